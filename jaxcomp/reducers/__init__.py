"""Reducers, which compute the mean over all workers' links."""
