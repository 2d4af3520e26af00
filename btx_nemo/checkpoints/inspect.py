"""`inspect`: what a folder is, from settings and headers alone; an incomplete folder is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from btx_nemo.checkpoints.files import read_json
from btx_nemo.checkpoints.manifest import MANIFEST, read_manifest, verify_checksums
from btx_nemo.plan.progress import human_bytes


def inspect_checkpoint(folder: str | Path, *, checksums: bool = False) -> dict[str, Any]:
    """Facts of a Hugging Face folder, a mixture, a Megatron checkpoint or a run directory (its latest checkpoint).

    Keys: path, kind, family, dtype, bytes, parameters {total, active, parts}, model (the architecture), moe (experts
    with their origin, top_k, router) or None, training (step, optimizer state, number of averages) or None, tokenizer,
    made_by (manifest) or None, sources (name -> path, layout_sha256) of what it was made of. JSON values only. With
    `checksums` every file is compared with the manifest's, and `checksums` says how many were.
    Raises UserError when the folder is not complete, or is none of these, or a file differs from its checksum.
    """
    from btx_nemo.families.parameters import count_parameters
    from btx_nemo.families.source import open_source

    source = open_source(Path(folder))
    layout = source.layout()
    manifest = read_manifest(source.folder) if (source.folder / MANIFEST).exists() else None
    config = source.config
    stored = source.reader.layout()
    return {
        "path": str(source.folder),
        "kind": {"hf": "Hugging Face folder", "megatron": "Megatron checkpoint"}[source.kind],
        "family": config.family,
        "dtype": source.dtype,
        "bytes": sum(info.nbytes for info in stored.values()),
        "parameters": count_parameters(layout, config),
        "model": {
            key: getattr(config, key)
            for key in (
                "num_layers",
                "hidden_size",
                "ffn_hidden_size",
                "num_attention_heads",
                "num_query_groups",
                "head_dim",
                "vocab_size",
                "max_position_embeddings",
                "norm_eps",
                "rope_theta",
                "rope_scaling",
                "attention_bias",
                "qk_norm",
                "post_norm",
                "sliding_window",
                "layer_types",
                "tie_word_embeddings",
            )
        },
        "moe": _mixture(config, manifest),
        "training": _training(Path(folder), source, manifest),
        "tokenizer": any(source.tokenizer.glob("tokenizer*")) if source.tokenizer.is_dir() else False,
        "made_by": {k: v for k, v in manifest.items() if k not in ("files", "sources")} if manifest else None,
        "sources": _sources(manifest),
        **({"checksums": verify_checksums(source.folder, manifest or {"files": {}})} if checksums else {}),
    }


def _mixture(config: Any, manifest: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if config.moe is None:
        return None
    names = config.moe.experts or [f"expert {i}" for i in range(config.moe.num_experts)]
    known = (manifest or {}).get("sources", {}) if (manifest or {}).get("kind") == "mix" else {}
    origin = {name: facts.get("path") for name, facts in known.items() if isinstance(facts, dict)}
    history = (manifest or {}).get("history", [])
    for entry in history:
        origin = entry.get("experts", {}) | origin
    origin["generalist"] = (history[0].get("seed") if history else None) or origin.get("seed")
    return {
        "num_experts": config.moe.num_experts,
        "top_k": config.moe.top_k,
        "router": config.moe.router,
        "experts": [{"name": name, "origin": origin.get(name)} for name in names],
    }


def history_lines(history: list[dict[str, Any]]) -> list[str]:
    """What was done to a mixture, the oldest first, and what is to be trained after the last."""
    lines = []
    for number, entry in enumerate(history, 1):
        options = ", ".join(f"{key}={value}" for key, value in entry.get("options", {}).items() if value is not None)
        experts = ", ".join(f"{name}={path}" for name, path in entry.get("experts", {}).items())
        lines.append(
            f"  {number}. {entry.get('recipe')} of {entry.get('in') or entry.get('seed')}"
            + (f" with {experts}" if experts else "")
            + (f" ({options})" if options else "")
        )
    if history and history[-1].get("retrain"):
        lines.append(f"  next: {history[-1]['retrain']}")
    return lines


def _sources(manifest: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a folder was made of, each with the hash over its tensors' names, shapes, dtypes and its files' sizes."""
    stated = (manifest or {}).get("sources", {})
    return {name: facts for name, facts in dict(stated).items() if isinstance(facts, dict)}


def _training(folder: Path, source: Any, manifest: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if source.kind != "megatron":
        return None
    facts: dict[str, Any] = {
        "step": (manifest or {}).get("step"),
        "optimizer_state": any(key.startswith(("optimizer", "chained_")) for key in source.reader.training_state),
        "averages": len(source.reader.averages),
    }
    if (folder / "latest").exists():
        facts["run"] = str(folder)
        facts["finished"] = (folder / "DONE").exists()
        if facts["finished"]:
            facts["done"] = read_json(folder / "DONE")
    return facts


def print_inspection(facts: Mapping[str, Any]) -> None:
    """The facts as lines for people."""
    parameters, model = facts["parameters"], facts["model"]
    print(
        f"{facts['path']}: {facts['kind']}, family {facts['family']}, {facts['dtype']}, {human_bytes(facts['bytes'])}"
    )
    print(f"parameters: {parameters['total']:,} in total, {parameters['active']:,} active per token")
    for part, count in parameters["parts"].items():
        active = f", {count['active']:,} active" if count["active"] != count["total"] else ""
        print(f"  {part}: {count['total']:,}{active}")
    print("model: " + ", ".join(f"{key}={value}" for key, value in model.items()))
    moe = facts["moe"]
    if moe is None:
        print("dense: no experts")
    else:
        print(f"mixture: {moe['num_experts']} experts, top_k={moe['top_k']}, router {moe['router']}")
        for number, expert in enumerate(moe["experts"]):
            print(f"  expert {number}: {expert['name']}" + (f"  from {expert['origin']}" if expert["origin"] else ""))
    training = facts["training"]
    if training:
        state = "with" if training["optimizer_state"] else "without"
        step = "weights only" if training["step"] is None else f"step {training['step']}"
        finished = {True: ", finished", False: ", not finished", None: ""}[training.get("finished")]
        averages = f", averages of {training['averages']} tensors" if training["averages"] else ""
        print(f"training: {step}, {state} optimizer state{averages}{finished}")
    if "checksums" in facts:
        held = f"{facts['checksums']} files are as they were written" if facts["checksums"] else "the manifest has none"
        print(f"checksums: {held}")
    made_by = facts["made_by"]
    if made_by:
        print(f"made by: {made_by.get('tool')} {made_by.get('tool_version')} ({made_by.get('kind')})")
        for line in history_lines(made_by.get("history", [])):
            print(line)
    for name, source in facts["sources"].items():
        print(f"  {name}: {source.get('path')}  layout sha256 {str(source.get('layout_sha256'))[:12]}")
