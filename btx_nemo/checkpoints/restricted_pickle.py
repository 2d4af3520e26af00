"""Reading pickles without running anything: known names become inert records, every other name is refused.

The C unpickler allocates what a pickle asks for before it looks at its size, so this builds on the pure Python one,
without the opcodes that a checkpoint never has.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

from btx_nemo.errors import UserError


class Record:
    """Stands for an object of an allowed class: its constructor's arguments, or its state."""

    args: Any
    state: dict[str, Any]

    def __new__(cls, *args: Any) -> Record:
        self = super().__new__(cls)
        self.args, self.state = args, {}
        return self

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple) and len(state) == 2:  # (dict, slots)
            state = {**(state[0] or {}), **(state[1] or {})}
        if isinstance(state, dict):
            self.state.update(state)
        else:
            self.args = state

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self.__dict__["state"][name]
        except KeyError:
            raise AttributeError(name) from None


_REFUSED_OPCODES = (
    pickle.BYTEARRAY8,
    pickle.NEXT_BUFFER,
    pickle.READONLY_BUFFER,
    pickle.EXT1,
    pickle.EXT2,
    pickle.EXT4,
    pickle.PERSID,
    pickle.INST,
)


_PurePython: Any = pickle._Unpickler  # type: ignore[attr-defined]


def load(
    data: bytes,
    allowed: Callable[[str, str], Any],
    where: str,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Unpickle `data`; `allowed(module, name)` returns the inert stand-in for a global, or None to refuse it.

    Raises UserError naming `where` on anything that is not a plain, allowed pickle.
    """

    class Unpickler(_PurePython):
        dispatch: ClassVar[Any] = {
            key: run for key, run in _PurePython.dispatch.items() if bytes([key]) not in _REFUSED_OPCODES
        }

        def find_class(self, module: str, name: str) -> Any:
            found = allowed(module, name)
            if found is None:
                raise UserError(f"{where}: refers to {module}.{name}, which a checkpoint of ours never does; refused")
            return found

        def persistent_load(self, pid: Any) -> Any:
            if persistent is None:
                raise pickle.UnpicklingError("persistent ids are not expected")
            return persistent(pid)

    try:
        return Unpickler(io.BytesIO(data)).load()
    except UserError:
        raise
    except RecursionError:
        raise UserError(f"{where}: nested too deeply; damaged, or not a checkpoint of ours") from None
    except Exception as error:  # a damaged pickle can fail in any way
        raise UserError(f"{where}: cannot be read ({type(error).__name__}: {error}); damaged, copy it again") from None
