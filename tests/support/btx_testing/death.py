"""Ways for a command under test to die or be interrupted at one exact place, for `CommandServer.start(before=...)`."""

from __future__ import annotations

import errno
import functools
import importlib
import os
import signal
import threading
import time
from typing import Any


def at(place: str) -> None:
    """Kills this process before call number n of a function: "module:function:n"; "module:Class.method:n" too."""
    _patch(place, lambda: os.kill(os.getpid(), signal.SIGKILL))


def on_rank(order: str) -> None:
    """One of these on one rank alone: "RANK FUNCTION ARGUMENT"."""
    rank, function, argument = order.split(" ")
    if os.environ.get("RANK", "0") == rank:
        globals()[function](argument)


def raise_at(place: str) -> None:
    """A bug: an exception before call number n."""

    def fail() -> None:
        raise ZeroDivisionError("a bug that a test put here")

    _patch(place, fail)


def disk_full_at(place: str) -> None:
    """No space left, at call number n."""

    def fail() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    _patch(place, fail)


def hang_at(place: str) -> None:
    """Nothing any more, before call number n."""
    _patch(place, lambda: time.sleep(1000))


def term_at(place: str) -> None:
    """Sends SIGTERM to the whole process group, as Slurm does, before call number n."""
    _patch(place, lambda: os.killpg(0, signal.SIGTERM))


def usr1_at(place: str) -> None:
    """Sends SIGUSR1 several times before call number n, and again while the command reacts."""

    def signals() -> None:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGUSR1)
        threading.Thread(target=_nag, daemon=True).start()

    _patch(place, signals)


def _nag() -> None:
    while True:
        time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGUSR1)


def while_writing(pattern: str) -> None:
    """Kills this process and its children as soon as a file matches the glob pattern."""
    import glob

    def watch() -> None:
        while not glob.glob(pattern, recursive=True):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _patch(place: str, action: Any) -> None:
    module, name, number = place.split(":")
    owner: Any = importlib.import_module(module)
    *outer, name = name.split(".")
    for part in outer:
        owner = getattr(owner, part)
    original, calls = getattr(owner, name), 0

    @functools.wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == int(number):
            action()
        return original(*args, **kwargs)

    setattr(owner, name, counted)


def forget_optimizer(_: str) -> None:
    """Resumes without the optimizer's state."""
    import btx_nemo.train.checkpoint as checkpoint

    checkpoint.load_optimizer_state = lambda *_, **__: None


def poisoned_and_killed(places: str) -> None:
    """`poison_at`, and a SIGKILL before a step: "6,7@1/10"."""
    poison, _, number = places.partition("/")
    poison_at(poison)
    at(f"btx_nemo.train.run:train_step:{number}")


def poison_at(places: str) -> None:
    """Makes a gradient infinite in some steps, on all ranks or one: "6,7" or "6,7@1"."""
    import btx_nemo.train.run as run

    numbers, _, rank = places.partition("@")
    if rank and os.environ.get("RANK", "0") != rank:
        return
    steps, train_step = {int(number) for number in numbers.split(",")}, run.train_step

    def poisoned(trainee: Any, *args: Any, **kwargs: Any) -> Any:
        weight = next(parameter for parameter in trainee.gpt.parameters() if parameter.requires_grad)
        bad = kwargs["step"] + 1 in steps
        hook = weight.register_hook(lambda gradient: gradient * (float("inf") if bad else 1.0))
        result = train_step(trainee, *args, **kwargs)
        hook.remove()
        return result

    run.train_step = poisoned


def slow_steps(seconds: str) -> None:
    """Each step takes so much longer."""
    import btx_nemo.train.run as run

    train_step = run.train_step

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(float(seconds))
        return train_step(*args, **kwargs)

    run.train_step = slow


def slow_writer(order: str) -> None:
    """Each writer of a checkpoint takes so much longer, and this process is killed before a call: "SECONDS@PLACE"."""
    import btx_nemo.train.writer as writer

    seconds, _, place = order.partition("@")
    write = writer._write

    def slow(*args: Any) -> None:
        time.sleep(float(seconds))
        write(*args)

    writer._write = slow
    at(place)


def writer_killed(number: str) -> None:
    """The writer of checkpoint number n is killed before it has written anything."""
    import btx_nemo.train.writer as writer

    write, started = writer._write, writer.Writer.__init__
    count = 0

    def counted(*args: Any) -> None:
        nonlocal count
        count += 1
        started(*args)

    def killed(*args: Any) -> None:
        if count == int(number):
            os.kill(os.getpid(), signal.SIGKILL)
        write(*args)

    writer.Writer.__init__, writer._write = counted, killed
