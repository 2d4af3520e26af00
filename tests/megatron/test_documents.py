"""Several documents in one sequence: losses and gradients are those of each document alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from btx_testing import router_jobs
from btx_testing.chats import chat_domain, packed_batch
from btx_testing.models import make_mixtral, make_model
from btx_testing.pool import RankPool
from btx_testing.runs import SIZES, VOCAB

from btx_nemo.data.indexed import open_indexed
from btx_nemo.megatron.documents import document_mask
from btx_nemo.plan.evaluate import evaluate
from btx_nemo.plan.expr import infer
from btx_nemo.plan.layout import TensorInfo
from btx_nemo.train.source import open_source

SEQ = 120


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_domain(tmp_path_factory.mktemp("chats"), "d", 12, words=2)


def alone(folder: Path, data: Path, scratch: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss per target, and its gradients by Megatron's names, from transformers: one conversation a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    total, count = torch.zeros(()), 0.0
    for number in range(12):
        ids = torch.tensor(open_indexed(data / "d/train").document(number).astype("int64"))
        targets = torch.tensor(open_indexed(data / "d/train.targets").document(number)[1:].astype("float32"))
        losses = torch.nn.functional.cross_entropy(model(ids[None, :-1]).logits[0], ids[1:], reduction="none")
        total, count = total + (losses * targets).sum(), count + targets.sum().item()
    (total / count).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    model.save_pretrained(scratch)  # the conversion only moves numbers about, so it carries gradients as well
    source = open_source(scratch)
    layouts = {name: reader.layout() for name, reader in source.readers.items()}
    gradients = {}
    for key, expression in source.expressions.items():
        info = TensorInfo(infer(expression, layouts, TensorInfo((), "float32")).shape, "float32")
        gradients[key] = evaluate(expression, source.readers, info, key, 0)
    return (total / count).item(), gradients


MIXTURE = {"num_local_experts": 4}
CASES = [
    pytest.param("llama-yarn", {}, {}, 1, id="llama", marks=pytest.mark.slow),
    pytest.param("llama-yarn", {"pp": 2}, {}, 2, id="llama-pp2"),
    pytest.param("qwen2-window", {}, {"recompute": "full"}, 1, id="windows-recomputed"),
    pytest.param("olmo3-yarn", {"tp": 2}, {}, 2, id="windows-tp2", marks=pytest.mark.slow),
    pytest.param("mixtral", {}, {"recompute": "full"}, 1, id="mixture-recomputed", marks=pytest.mark.slow),
    pytest.param("mixtral", {"tp": 2, "pp": 2, "ep": 2}, {}, 4, id="mixture-tp2-pp2-ep2"),
    pytest.param("mixtral", {"tp": 2, "ep": 2, "etp": 2}, {}, 4, id="mixture-tp2-ep2-etp2", marks=pytest.mark.slow),
    pytest.param("mixtral-window", {"ep": 2}, {}, 2, id="mixture-windows-dp2", marks=pytest.mark.slow),
    pytest.param("mixtral-window", {"cp": 2, "ep": 2}, {}, 2, id="mixture-windows-cp2"),
    pytest.param("llama-yarn", {"pp": 2, "vpp": 2}, {}, 2, id="llama-vpp2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "layout", "options", "count"), CASES)
def test_a_packed_batch_is_its_conversations_alone(
    ranks: RankPool, data: Path, tmp_path: Path, name: str, layout: dict[str, int], options: dict[str, Any], count: int
) -> None:
    folder = make_model(tmp_path / "hf", name, seed=3, vocab_size=VOCAB)
    batch = packed_batch(data, "d", SEQ)
    if len(batch["tokens"]) % 2:
        batch = {key: torch.cat([value, value[:1]]) for key, value in batch.items()}
        batch["loss_mask"][-1] = 0
    assert 2 <= len(batch["tokens"]) < 12 and batch["padding"].any()
    settings = {"router": {"losses": {}}, "per_token_loss": True, "micro_batch_size": 1, "documents": True, **options}
    results = ranks.run(router_jobs.steps, str(folder), layout, batch, settings, ranks=count)
    loss, expected = alone(folder, data, tmp_path / "gradients")
    found = router_jobs.whole(results)
    assert all(result["losses"][0] == pytest.approx(loss, rel=1e-5) for result in results)
    checked = 0
    for key, value in found.items():
        name_of = next((k for k in expected if key.endswith(k)), None)
        assert name_of is not None, key
        want = expected[name_of]
        torch.testing.assert_close(value[: len(want)].reshape(want.shape), want, atol=1e-5, rtol=1e-4)
        checked += 1
    assert checked == len(expected)


def test_padding_is_in_no_balance_loss_and_no_count(ranks: RankPool, data: Path, tmp_path: Path) -> None:
    folder = make_mixtral(tmp_path / "hf", seed=3, **SIZES)
    tight = packed_batch(data, "d", SEQ)
    tight = {key: value[:1] for key, value in tight.items()}
    full = int((~tight["padding"]).sum())
    tight = {key: value[:, :full] for key, value in tight.items()}
    loose = {key: torch.cat([value, value[:, :9]], dim=1) for key, value in tight.items()}
    loose["padding"][:, full:], loose["loss_mask"][:, full:] = True, 0
    loose["position_ids"][:, full:] = torch.arange(9)
    options = {"router": {"losses": {"btx": 5.0}}, "documents": True}
    (first,) = ranks.run(router_jobs.steps, str(folder), {}, tight, options, ranks=1)
    (second,) = ranks.run(router_jobs.steps, str(folder), {}, loose, options, ranks=1)
    assert second["losses"] == pytest.approx(first["losses"], rel=1e-5)
    assert second["norms"] == pytest.approx(first["norms"], rel=1e-5)
    torch.testing.assert_close(torch.tensor(second["routing"]["load"]), torch.tensor(first["routing"]["load"]))


def test_the_mask_by_hand() -> None:
    assert document_mask(torch.arange(4)[None]) is None
    mask = document_mask(torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]]))
    assert mask is not None and mask.shape == (2, 1, 4, 4)
    assert (~mask[0, 0]).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert torch.equal(~mask[1, 0], torch.ones(4, 4, dtype=torch.bool).tril())
