"""Run by the Python of another environment, with transformers 4: logits of folders, and folders that it writes.

Usage: python transformers_4.py TOKENS.pt FOLDER...   writes FOLDER/logits.pt and FOLDER/rewritten, prints JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(tokens: str, *folders: str) -> None:
    """For each folder: what loading it missed, its logits, and the model as this version saves it."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    report: dict[str, object] = {"version": transformers.__version__}
    batch = torch.load(tokens)
    for folder in folders:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, torch_dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        report[folder] = {key: sorted(map(str, value)) for key, value in info.items() if value}
        with torch.no_grad():
            torch.save(model.eval()(batch).logits, Path(folder) / "logits.pt")
        model.save_pretrained(Path(folder) / "rewritten")
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
