"""SequentialMLP, GroupedMLP and TEGroupedMLP read each other's checkpoints, in every spelling, and so do we."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from btx_testing import expert_layers
from btx_testing.expert_layers import LAYERS
from btx_testing.models import make_model
from btx_testing.pool import RankPool
from btx_testing.tensors import load_folder, same_bits

from btx_nemo.checkpoints.respelled import SPELLINGS, experts_apart, respelled
from btx_nemo.checkpoints.torch_dist import DistReader
from btx_nemo.checkpoints.torch_dist_sink import DistSink
from btx_nemo.convert.to_hf import export_hf
from btx_nemo.convert.to_megatron import import_hf
from btx_nemo.plan.execute import execute
from btx_nemo.plan.expr import Take, infer
from btx_nemo.plan.layout import Layout
from btx_nemo.plan.plan import Job, Plan

NAMES = ("linear_fc1", "linear_fc2")
KEY = "decoder.layers.0.mlp.experts.experts.{}.weight"
State = dict[str, torch.Tensor]


def whole(of_ranks: list[State | None]) -> State:
    """All experts; skips where this Megatron-Core has no such layer."""
    if of_ranks[0] is None:
        pytest.skip("this Megatron-Core has no GroupedMLP; Megatron-Core 0.16, on Python 3.10 or 3.11, has it")
    return {name: torch.cat([rank[name] for rank in of_ranks if rank]) for name in NAMES}


def spell(source: Path, out: Path, spelling: str) -> Layout:
    """The checkpoint of a lone layer written anew."""
    out.mkdir()
    reader = respelled(DistReader(source))
    layouts = {"ckpt": reader.layout()}
    table = {key: Take("ckpt", key) for key in reader.layout()}
    written = experts_apart(table, reader.layout()) if spelling == "apart" else table
    jobs = tuple(Job(key, infer(expr, layouts), expr) for key, expr in written.items())
    sink = DistSink(out, {job.target: job.info for job in jobs}, spelling=spelling)
    execute(Plan(jobs, layouts), {"ckpt": reader}, sink)
    sink.close()
    return DistReader(out).layout()


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(("saved", "loaded"), itertools.product(LAYERS, LAYERS))
def test_each_layer_reads_what_each_other_saved(
    ranks: RankPool, tmp_path: Path, saved: str, loaded: str, spelling: str
) -> None:
    """Straight, through our reader, and written anew by us in either spelling: the same bits."""
    (tmp_path / "saved").mkdir()
    metadata = SPELLINGS[spelling]
    expected = whole(ranks.run(expert_layers.saves, saved, str(tmp_path / "saved"), metadata, ranks=2))
    reader = respelled(DistReader(tmp_path / "saved"))
    assert same_bits({name: reader.read(KEY.format(name)) for name in NAMES}, expected)
    assert same_bits(whole(ranks.run(expert_layers.loads, loaded, str(tmp_path / "saved"), ranks=2)), expected)
    for ours in SPELLINGS:
        keys = spell(tmp_path / "saved", tmp_path / ours, ours).keys()
        assert (f"{KEY.format('3.linear_fc1')}_w" in keys) == (ours == "apart")
        if ours == spelling:
            assert keys == DistReader(tmp_path / "saved").layout().keys(), "Megatron's keys are ours"
        assert same_bits(whole(ranks.run(expert_layers.loads, loaded, str(tmp_path / ours), ranks=2)), expected)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe-shared", "qwen3_moe", "qwen3"])
def test_a_whole_model_is_spelled_either_way_and_back(ranks: RankPool, tmp_path: Path, name: str) -> None:
    """Imported apart, written anew stacked, and the reverse; Megatron's own loader fills a model from each."""
    from btx_testing import law_jobs
    from btx_testing.models import hf_logits, probe_tokens

    src = make_model(tmp_path / "src", name, seed=8)
    assert "read back equal; logits on the probe differ" in import_hf(
        src, tmp_path / "apart", experts="apart", verify="true"
    )
    import_hf(tmp_path / "apart", tmp_path / "stacked", experts="stacked")
    import_hf(tmp_path / "stacked", tmp_path / "apart again", experts="apart")
    import_hf(src, tmp_path / "plain")
    layouts = {path.name: DistReader(path).layout() for path in tmp_path.iterdir() if path != src}
    assert layouts["apart"] == layouts["apart again"] and layouts["stacked"] == layouts["plain"]
    assert layouts["apart"] != layouts["plain"]
    tokens, original = probe_tokens(), load_folder(src)
    for folder in ("apart", "stacked", "apart again"):
        export_hf(tmp_path / folder, tmp_path / f"{folder} back")
        assert same_bits(original, load_folder(tmp_path / f"{folder} back"))
    expected = hf_logits(src, tokens)
    for folder in ("apart", "stacked"):
        loaded = ranks.run(law_jobs.megatron_loads, str(tmp_path / folder), {"tp": 2, "ep": 1}, tokens, ranks=2)
        found = [logits for logits in loaded if logits is not None]
        assert found
        for logits in found:
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
