"""The errors a user can cause, and the exit code of each. Only `cli.py` turns them into an exit."""

from __future__ import annotations


class BtxError(Exception):
    """Base of all errors that end a command in one line: where, what, remedy."""

    exit_code = 1


class CheckFailed(BtxError):
    """A check that the user asked for said no (`verify`, `inspect`)."""

    exit_code = 1


class UserError(BtxError):
    """The user's input is wrong. The message names the place, the value and the remedy."""

    exit_code = 2


class EnvironmentLacks(BtxError):
    """The machine or the installation lacks something. The message says how to get it."""

    exit_code = 3


class RankFailed(BtxError):
    """A rank of a training run failed or was lost, and the job ends. Only the first one to say so is shown."""

    exit_code = 1

    def __init__(self, message: str, *, first: bool):
        super().__init__(message)
        self.first = first


class Stopped(BtxError):
    """Stopped early on request with a checkpoint saved: running the same command again resumes."""

    exit_code = 75
