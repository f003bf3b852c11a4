"""The tests: a file for each module, with shared tables, recipes and textbook definitions."""

from collections.abc import Callable
from pathlib import Path
import time

ROOT = Path(__file__).parents[1]  # the checkout, where scripts of the tests run


def wait_until(condition: Callable[[], object], seconds: float = 120) -> None:
    """Waits until ``condition()`` is true.

    Raises:
      TimeoutError: it is not true within ``seconds``.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"the condition does not hold after {seconds} s")
        time.sleep(0.002)
