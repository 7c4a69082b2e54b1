"""What every script shares at the command line: one clear line for bad usage, exit codes, and quiet libraries.

Exit codes: 0 done; 2 bad usage or input, one line on stderr that names the mend, no traceback; 1 anything else.

    if __name__ == "__main__":
        sys.exit(run(main))
"""
from __future__ import annotations

import argparse
import os
import signal
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Iterator

from images import DataError


class Parser(argparse.ArgumentParser):
    """argparse that takes no abbreviated flags and says what is wrong in one line, without the whole usage."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str):
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def run(main: Callable[[], int]) -> int:
    """The exit code of a command."""
    from model import ModelError                     # here, so that a script without a model need not wait for torch

    quiet_libraries()
    try:
        return main()
    except (DataError, ModelError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 1


def quiet_libraries() -> None:
    """No progress bars for reading a file of weights, no notes that no user can act on. Errors stay."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)   # peft's own call


@contextmanager
def interruptions() -> Iterator[list[int]]:
    """Within, Ctrl-C and SIGTERM only leave a note, so that a step can be finished and saved; a second one ends at once."""
    noted: list[int] = []
    before = {number: signal.signal(number, lambda n, _: os._exit(1) if noted else noted.append(n))
              for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def one_line(text: object) -> str:
    """A message without its line breaks."""
    return " ".join(str(text).split())


def read_text(file: str, flag: str) -> str:
    """The text of a file given with `flag`."""
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{flag} {file}: {getattr(error, 'strerror', None) or 'not UTF-8 text'}; give a text file") from None


if __name__ == "__main__":
    def demo() -> int:
        raise DataError("--data photos: nothing there;\n put annotation files into photos/annotations")

    print("exit code", run(demo))
