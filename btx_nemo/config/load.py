"""Reading `conf/` with Hydra: a named file, its defaults, and overrides in Hydra's grammar."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from btx_nemo.checkpoints.atomic import write_file
from btx_nemo.checkpoints.files import read_regular
from btx_nemo.errors import EnvironmentLacks, UserError


def conf_dir() -> Path:
    """The `conf/` of this installation: inside the wheel, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "conf", package.parent / "conf"):
        if candidate.is_dir():
            return candidate
    raise EnvironmentLacks(f"no conf/ beside {package}; install btx-nemo again, or give --config-path DIR")


def load(command: str, name: str, overrides: list[str], config_path: str | None = None) -> dict[str, Any]:
    """The resolved configuration `conf/<command>/<name>.yaml` as a plain dictionary.

    `config_path` replaces `conf/<command>`, where what the file names in its `defaults` is still found. Raises
    UserError for an unknown name (listing the known ones), an override that does not parse or names an unknown key, and
    a value that is still missing ("???").
    """
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    folder = Path(config_path).resolve() if config_path else conf_dir() / command
    known = sorted(p.stem for p in folder.glob("[!_]*.yaml")) if folder.is_dir() else []
    if name not in known:
        raise UserError(f"--config-name {name}: not in {folder}; known: {', '.join(known) or 'none'}")
    where = f"{folder.name}/{name}.yaml"
    for override in overrides:
        _check_override(override, where)
    GlobalHydra.instance().clear()
    searched = [f"hydra.searchpath=[{quoted(f'file://{conf_dir() / command}')}]"] if config_path else []
    try:
        with initialize_config_dir(str(folder), version_base="1.3"):
            config = compose(config_name=name, overrides=[*searched, *(_forced(o, folder) for o in overrides)])
        missing = _missing(OmegaConf.to_container(config))
        if missing:
            raise UserError(f"{where}: {missing[0]} is required; give {missing[0]}=VALUE")
        values = OmegaConf.to_container(config, resolve=True)
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:  # some of Hydra's are plain
        raise UserError(f"{where}: {_one_line(error)}{_cause(error)}") from error
    except RecursionError as error:
        raise UserError(f"{where}: refers to itself or is nested too deep; mend the file or the override") from error
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _forced(override: str, folder: Path) -> str:
    """`k=v` as `++k=v`, so that open mappings (`experts.math=DIR`) take new keys; `build` refuses unknown ones."""
    key = re.match(r"[\w.\-/@]+(?==)", override)
    return f"++{override}" if key and not (folder / key.group()).is_dir() else override


def _check_override(override: str, where: str) -> None:
    """Raise UserError, which names the override and says how to spell it, for one that Hydra's grammar refuses."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, equals, value = override.partition("=")
    if re.match(r"[+~]*hydra\b", key):
        raise UserError(
            f"{where}: override {override!r}: unknown key {key.lstrip('+~')}; nothing of Hydra's own is set"
        )
    try:
        many = OverridesParser.create().parse_override(override).is_sweep_override()
        why = "is a list of choices"
    except (HydraException, ValueError, RecursionError) as error:
        many, why = True, _one_line(error) if isinstance(error, HydraException) else "cannot be read"
    if not many:
        return
    if not equals or not re.fullmatch(r"[+~]{0,2}[A-Za-z_][\w.\-/@]*", key, re.ASCII):
        raise UserError(f"{where}: override {override!r}: expected KEY=VALUE ({why})")
    if re.search(r"['\"\\$`!]", value):
        spelled = shlex.quote(f"{key}={quoted(value)}")
    else:
        spelled = f"{key}=\"'{value}'\""
    raise UserError(f"{where}: override {override!r}: {why}; quote a text that holds such characters: {spelled}")


def quoted(text: str) -> str:
    """A text as Hydra's grammar reads it back."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _cause(error: Exception) -> str:
    """What lies behind Hydra's "Error merging override", or behind nothing at all, which do not say it."""
    if error.__cause__ is not None and not str(error):
        return f"{_one_line(error.__cause__)}; put quotes around a key that YAML takes for something else than a text"
    if error.__cause__ is None or "merging override" not in str(error):
        return ""
    return f": {str(error.__cause__).splitlines()[0]}; give a value of the kind that is there"


def _missing(values: Any, path: str = "") -> list[str]:
    """Keys that are still "???"."""
    if isinstance(values, dict):
        return [m for key, v in values.items() for m in _missing(v, f"{path}.{key}" if path else str(key))]
    return [path] if values == "???" else []


def _one_line(error: BaseException) -> str:
    text = re.sub(r"See https://hydra.cc\S* for details", "", str(error))
    return re.sub(r"\s+", " ", text).strip()


def save_resolved(config: Any, path: Path) -> None:
    """Writes a configuration dataclass as YAML, every default filled in; whole or not at all."""
    import dataclasses

    import yaml

    write_file(path, yaml.safe_dump(dataclasses.asdict(config), sort_keys=False))


def read_resolved(path: Path) -> dict[str, Any] | None:
    """What `save_resolved` wrote; None where it is damaged. Raises UserError where it is no file that can be read."""
    import yaml

    try:
        values = yaml.safe_load(read_regular(path, 1 << 20))
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) else None
