"""Models on the Hugging Face hub, as folders."""

from __future__ import annotations

import re
from pathlib import Path

from btx_nemo.checkpoints.tokenizer_files import PATTERNS
from btx_nemo.errors import UserError

MODEL_ID = re.compile(r"([A-Za-z0-9][\w.-]*)/([\w.-]+?)(?:@([\w./-]+))?")
"""`org/name`, or `org/name@revision`: a branch, tag or commit."""
WANTED = ("config.json", "model*.safetensors", "model.safetensors.index.json", *PATTERNS)
BINS = ("pytorch_model*.bin", "pytorch_model.bin.index.json")


def local_folder(place: str | Path, allow_bin: bool = False) -> Path:
    """The folder `place` where it is there; else, where that can be the id of a model on the hub, its download.

    Settings, tokenizer and safetensors are downloaded, into the hub's own cache; pytorch_model.bin only with
    `allow_bin` and where there are no safetensors. Raises UserError when there is neither a folder nor such a model.
    """
    path = Path(place)
    match = MODEL_ID.fullmatch(str(place))
    if path.exists() or path.is_symlink() or not match or Path(match[1]).is_dir():
        if not path.is_dir():
            raise UserError(f"{path}: no such folder; give a Hugging Face folder, a checkpoint or a run directory")
        return path
    name, revision = f"{match[1]}/{match[2]}", match[3]
    folder = _download(str(place), name, revision, WANTED)
    if allow_bin and not any(folder.glob("model*.safetensors")):
        folder = _download(str(place), name, revision, (*WANTED, *BINS))
    return folder


def _download(place: str, name: str, revision: str | None, patterns: tuple[str, ...]) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub = constants.ENDPOINT
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except GatedRepoError:
        remedy = f"is gated; accept its terms at {hub}/{name}, then `hf auth login`"
    except RepositoryNotFoundError:
        remedy = f"no such folder here, and no such model on {hub} that you may see; check the name, or `hf auth login`"
    except RevisionNotFoundError:
        remedy = f"the model {name} on {hub} has no revision {revision!r}"
    except HFValidationError:
        remedy = "no such folder; give a Hugging Face folder, a checkpoint or a run directory"
    except LocalEntryNotFoundError:
        remedy = f"no such folder here, and {hub} cannot be reached to look for a model of that name; check the path"
    except Exception as error:  # a download can fail in any way that a network can
        reason = str(error).strip().split("\n")[0]
        remedy = f"the download from {hub} failed ({type(error).__name__}: {reason}); run again to go on with it"
    raise UserError(f"{place}: {remedy}") from None
