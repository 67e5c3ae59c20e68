"""The errors of readers."""


class WeightsError(RuntimeError):
    """Weights cannot be read; the reader still shows the version that it showed before."""


class VersionGap(WeightsError):  # noqa: N818
    """The newest version cannot be reached: says which, why, and which versions are there."""


class Damaged(WeightsError):  # noqa: N818
    """A file is not what was published: truncated, altered, or written by something else."""


class Untrusted(WeightsError):  # noqa: N818
    """A document is unsigned, signed by another key, or an old one in place of a newer one."""
