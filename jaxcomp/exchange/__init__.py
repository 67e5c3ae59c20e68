"""One plan and one exchange: the way of every gradient through links and collectives."""
