"""The one look of progress bars."""

from tqdm import tqdm


def bar(what: str, total: int, unit: str, show: bool = True) -> tqdm:
    """A bar that is gone when it is done; without ``show``, or where there is no terminal, none."""
    return tqdm(total=total, desc=what, unit=unit, disable=None if show else True, leave=False)
