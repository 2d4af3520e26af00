"""Every mistake in a training run's configuration: one line, exit 2, before anything is built, nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from btx_testing.chats import chat_domain
from btx_testing.commands import CommandServer, run_module, torchrun
from btx_testing.runs import TinyWorld

FRESH = "model={num_layers:2,hidden_size:32,ffn_hidden_size:48,num_attention_heads:4,num_query_groups:2,head_dim:8,%s}"
DENSE = FRESH % "vocab_size:288"
MOE = "moe:{num_experts:4,top_k:%s,router:%s}"

CASES = [
    # configuration: what it names and how it is written
    ("tiny_expert", ["nope=1"], "unknown key nope; known: stage, out,"),
    ("tiny_expert", ["optim.learning_rate=1"], "unknown key optim.learning_rate; known: lr,"),
    ("tiny_expert", ["steps=many"], "steps must be int, not 'many'"),
    ("tiny_expert", ["steps=1.5"], "steps must be int, not 1.5"),
    ("tiny_expert", ["optim.lr=null"], "optim.lr must be float, not nothing"),
    ("tiny_expert", ["layout=2"], "layout must be a mapping"),
    ("tiny_expert", ["optim.lr=[1"], "tiny_expert.yaml: "),
    ("tiny_expert", ["optim.lr"], "tiny_expert.yaml: "),
    ("tiny_expert", ["=3"], "tiny_expert.yaml: "),
    ("tiny_expert", ["a..b=3"], "tiny_expert.yaml: "),
    # values that no run can have
    ("tiny_expert", ["seed=-1"], "seed=-1: must lie between 0 and"),
    ("tiny_expert", ["seed=4294967296"], "seed=4294967296: must lie between 0 and"),
    ("tiny_expert", ["steps=100000000000000"], "Megatron's sample index holds fewer than"),
    ("tiny_expert", ["optim.eps=0"], "optim.eps=0.0: must be positive"),
    ("tiny_expert", ["router.losses.foo=1"], "router.losses.foo: no such loss; known: btx,"),
    ("tiny_expert", ["domain="], "domain"),
    ("tiny_expert", ["robust.hang_seconds=1e300"], "robust.hang_seconds=1e+300: must be at most 1e+09"),
    # places that cannot be
    ("tiny_expert", ["out=/dev/null/x"], "/dev/null"),
    ("tiny_expert", ["out=/proc/x/y"], "/proc/x"),
    ("tiny_expert", ["out=" + "a" * 300], "file name too long"),
    ("tiny_expert", ["domain=???"], "domain is required; give domain=VALUE"),
    # numbers out of range
    ("tiny_expert", ["stage=finetune"], "stage=finetune: unknown; known: expert, mix, router"),
    ("tiny_expert", ["precision=fp8"], "precision=fp8: unknown; known: fp32, bf16, fp16"),
    ("tiny_expert", ["steps=-1"], "steps=-1: must not be negative"),
    ("tiny_expert", ["checkpoint.every=-5"], "checkpoint.every=-5: must not be negative"),
    ("tiny_expert", ["checkpoint.keep=0"], "checkpoint.keep=0: must be 1 or more"),
    ("tiny_expert", ["micro_batch_size=0"], "micro_batch_size=0: must be 1 or more"),
    ("tiny_expert", ["log_every=0"], "log_every=0: must be 1 or more"),
    ("tiny_expert", ["global_batch_size=5"], "global_batch_size=5 is not a positive multiple of micro_batch_size=2"),
    ("tiny_expert", ["optim.min_lr=1"], "optim.min_lr=1.0 must lie between 0 and optim.lr"),
    ("tiny_expert", ["optim.lr=nan"], "optim.min_lr=0.0001 must lie between 0 and optim.lr=nan"),
    ("tiny_expert", ["optim.lr=inf"], "optim.lr=inf: must be a number"),
    ("tiny_expert", ["optim.beta2=1.0"], "optim.beta2=1.0: must lie between 0 and 1"),
    ("tiny_expert", ["optim.clip_grad=-1"], "optim.clip_grad=-1.0: must be a number that is not negative"),
    ("tiny_expert", ["optim.decay=step"], "optim.decay=step: unknown; known: cosine, linear, constant"),
    ("tiny_expert", ["optim.warmup_steps=12"], "optim.warmup_steps=12 must be below steps=12"),
    ("tiny_expert", ["optim.decay=wsd"], "optim.decay=wsd and anneal_steps=None: wsd needs it, others do not"),
    ("tiny_expert", ["optim.anneal_steps=2"], "optim.decay=cosine and anneal_steps=2: wsd needs it"),
    ("tiny_expert", ["optim.decay=wsd", "optim.anneal_steps=11"], "must lie between 1 and the 10 steps from the"),
    ("tiny_expert", ["optim.anneal=flat"], "optim.anneal=flat: unknown; known: linear, cosine"),
    ("tiny_expert", ["optim.schedule_unit=words"], "optim.schedule_unit=words: unknown; known: steps, samples, tok"),
    ("tiny_expert", ["optim.decay_steps=0"], "optim.decay_steps=0: must be 1 or more"),
    ("tiny_expert", ["optim.decay_steps=2"], "optim.warmup_steps=2 must be below optim.decay_steps=2"),
    (
        "tiny_expert",
        ["optim.schedule_unit=samples", "optim.warmup_steps=48"],
        "warmup_steps=48 must be below steps=12 (48 s",
    ),
    ("tiny_expert", ["optim.router_min_lr=1e-4"], "optim.router_min_lr=0.0001: without optim.router_lr"),
    ("tiny_mix", ["optim.router_lr=1e-4", "optim.router_min_lr=1e-3"], "must lie between 0 and optim.router_lr=0.0001"),
    ("tiny_expert", ["optim.router_lr=-1"], "optim.router_lr=-1.0: must be a number that is not negative"),
    ("tiny_mix", ["fp8.format=hybrid", "precision=bf16"], "fp8.format=hybrid: needs a GPU, this is the CPU"),
    ("tiny_mix", ["moe.dispatcher=flex"], "moe.dispatcher=flex: needs DeepEP and GPUs, which are not here"),
    ("tiny_mix", ["moe.experts=grouped"], "moe.experts=grouped: grouped layers are Transformer Engine's"),
    ("tiny_mix", ["router.losses.btx=-1"], "router.losses.btx=-1.0: must not be negative"),
    # model
    ("tiny_expert", ["init_from=nowhere"], "init_from=nowhere: no such folder"),
    ("tiny_expert", ["init_from={tmp}/empty"], "{tmp}/empty"),
    ("tiny_expert", ["init_from={data}"], "{data}"),
    ("tiny_expert", ["init_from=null"], "init_from and model: give one of them"),
    ("tiny_expert", [DENSE], "init_from and model: give one of them"),
    ("tiny_expert", ["init_from={mixture}"], "stage=expert trains a dense model, but {mixture} has 4 experts"),
    ("tiny_mix", ["init_from={dense}"], "stage=mix trains a mixture, but {dense} is dense; assemble one: btx-nemo mix"),
    ("tiny_expert", ["init_from=null", FRESH % "vocab_size:0"], "model: vocab_size=0 must be a whole number"),
    ("tiny_expert", ["init_from=null", DENSE.replace("groups:2", "groups:0")], "num_query_groups=0"),
    ("tiny_expert", ["init_from=null", DENSE.replace("groups:2", "groups:3")], "num_query_groups=3 does not divide"),
    ("tiny_expert", ["init_from=null", FRESH % "vocab_size:288,family:gpt9"], "gpt9"),
    ("tiny_mix", ["init_from=null", FRESH % f"vocab_size:288,{MOE % (5, 'top_k')}"], "top_k=5 must be from 1 to the 4"),
    ("tiny_mix", ["init_from=null", FRESH % f"vocab_size:288,{MOE % (0, 'top_k')}"], "top_k=0 must be from 1 to the 4"),
    ("tiny_mix", ["init_from=null", FRESH % f"vocab_size:288,{MOE % (2, 'best')}"], "moe.router=best: no such router"),
    ("tiny_mix", ["router.losses.magic=1"], "router.losses.magic: no such loss; known: btx"),
    ("tiny_mix", ["init_from={tmp}/greedy"], "{tmp}/greedy"),
    # routers
    ("tiny_mix", ["moe.router=magic"], "moe.router=magic: no such router; known: divmoe, expert_choice, flexolmo"),
    ("tiny_expert", ["moe.top_k=1"], "moe.top_k: the model is dense and has no router"),
    ("tiny_mix", ["moe.top_k=5"], "moe.top_k=5: must lie between 1 and the 4 experts"),
    ("tiny_mix", ["moe.top_k=1"], "the router would get no gradient; give moe.router=switch"),
    ("tiny_mix", ["moe.options.softmax=never"], "moe.options.softmax=never: unknown; known: after, before"),
    ("tiny_mix", ["moe.router=switch", "moe.top_k=2"], "moe.router=switch sends a token to 1 expert"),
    (
        "tiny_mix",
        ["moe.router=switch", "moe.options.capacity=2"],
        "unknown key moe.options.capacity; known: capacity_f",
    ),
    ("tiny_mix", ["moe.router=switch", "moe.options.capacity_factor=-1"], "capacity_factor=-1.0: must not be negative"),
    ("tiny_mix", ["moe.router=soft", "moe.options.capacity_factor=1"], "unknown key moe.options.capacity_factor"),
    ("tiny_mix", ["moe.router=divmoe"], "moe.options.groups is required"),
    ("tiny_mix", ["moe.router=divmoe", "moe.options.groups=3"], "moe.options.groups=3: must divide the 4 experts"),
    ("tiny_mix", ["moe.router=divmoe", "moe.options.groups=1"], "moe.top_k=2 is more than the moe.options.groups=1"),
    ("tiny_mix", ["moe.router=sample_top1", "moe.options.inference=best"], "known: argmax, hard"),
    ("tiny_mix", ["moe.router=expert_choice"], "moe.options.allow_non_causal=true if that is meant"),
    ("tiny_mix", ["moe.router=expert_choice", "moe.options.allow_non_causal=true"], "give router.losses.btx=0"),
    ("tiny_mix", ["moe.router=nexus"], "moe.options.embedding_size is required"),
    ("tiny_mix", ["moe.router=nexus", "moe.options.embedding_size=8"], "moe.shared_expert_intermediate_size=48"),
    (
        "tiny_mix",
        ["moe.router=nexus", "moe.options.embedding_size=8", "moe.shared_expert_intermediate_size=48"],
        "moe.options.embeddings=DIR",
    ),
    ("tiny_mix", ["moe.shared_expert_intermediate_size=-1"], "moe.shared_expert_intermediate_size=-1: must not"),
    ("tiny_mix", ["router.losses.load=1"], "router.losses.load: moe.router=top_k does not have what it takes"),
    ("tiny_mix", ["moe.router=noisy_top_k", "moe.top_k=4", "router.losses.load=1"], "moe.top_k=4 below the 4 experts"),
    ("tiny_mix", ["router.frozen_rows=[4]"], "router.frozen_rows=[4]: there are experts 0 to 3"),
    ("tiny_mix", ["router.frozen_rows=[0,1,2,3]"], "are all rows; give freeze=[*.mlp.router.*]"),
    ("tiny_mix", ["router.frozen_rows=[0]", "router.reset=true"], "would freeze fresh rows"),
    ("tiny_mix", ["dropout.expert=1"], "dropout.expert=1.0: must lie between 0 and 1"),
    ("tiny_mix", ["dropout.hidden=-0.1"], "dropout.hidden=-0.1: must lie between 0 and 1"),
    ("tiny_expert", ["dropout.expert=0.4"], "dropout.expert=0.4: the model is dense"),
    ("tiny_mix", ["router.input_jitter=1"], "router.input_jitter=1.0: must lie between 0 and 1"),
    ("tiny_mix", ["router.init_scale=-1"], "router.init_scale=-1.0: must not be negative"),
    ("tiny_mix", ["recompute=half"], "recompute=half: unknown; known: none, selective, full"),
    ("tiny_mix", ["recompute_modules=[mlp,norm]"], "recompute_modules=norm: unknown; known: core_attn, mlp, moe"),
    ("tiny_expert", ["init_from={tmp}/cut"], "{tmp}/cut/model.safetensors"),
    # layout
    ("tiny_expert", ["layout.tp=0"], "layout.tp=0: must be 1 or more"),
    ("tiny_expert", ["layout.tp=3"], "layout.tp=3 does not divide the model's num_attention_heads=4"),
    ("tiny_expert", ["layout.tp=4"], "layout.tp=4 does not divide the model's num_query_groups=2"),
    ("tiny_expert", ["layout.pp=3"], "layout.pp=3 does not divide the model's num_layers=2"),
    ("tiny_mix", ["layout.ep=3"], "layout.ep=3 does not divide the model's num_experts=4"),
    ("tiny_expert", ["layout.ep=2"], "layout.ep=2: the model is dense"),
    ("tiny_expert", ["layout.tp=2"], "tp=2 x pp=1 does not divide the 1 ranks that were started"),
    ("tiny_mix", ["layout.ep=2"], "layout.ep=2 does not divide the 1 ranks"),
    ("tiny_mix", ["layout.etp=2"], "layout.ep=1 x etp=2 does not divide the 1 ranks"),
    ("tiny_mix", ["layout.etp=5"], "layout.etp=5 does not divide the model's ffn_hidden_size=48"),
    ("tiny_mix", ["layout.etp=2", "dropout.expert=0.4"], "dropout.expert=0.4: not with experts that are cut"),
    ("tiny_expert", ["layout.etp=2"], "layout.etp=2: the model is dense, it has no experts to cut"),
    ("tiny_expert", ["layout.cp=2"], "tp=1 x pp=1 x cp=2 does not divide the 1 ranks that were started"),
    ("tiny_expert", ["layout.vpp=2"], "layout.vpp=2: virtual stages need a pipeline"),
    ("tiny_expert", ["layout.pp=2", "layout.vpp=2"], "layout.pp x vpp=4 does not divide the model's num_layers=2"),
    # data
    ("tiny_expert", ["data.path=nowhere"], "data.path=nowhere: no such folder"),
    (
        "tiny_expert",
        ["data.path={tmp}/empty"],
        "data.path={tmp}/empty: no prepared domain in it; make one: btx-nemo pr",
    ),
    ("tiny_expert", ["data.path={tmp}/empty", "domain=null"], "data.path={tmp}/empty: no prepared domain in it"),
    ("tiny_mix", ["data.path={tmp}/chats/data"], "data.blend: text and chats cannot be weighed against each other"),
    ("tiny_mix", ["data.blend={math:1e308,code:1e308}"], "data.blend.math=1e+308: must be a positive number"),
    ("tiny_mix", ["data.blend={math:1,code:1e-320}"], "data.blend.code=1e-320: less than 1e-06 of the blend"),
    ("tiny_expert", ["domain=law"], "no domain 'law'; known: code, math"),
    ("tiny_mix", ["data.blend.law=1"], "no domain 'law'; known: code, math"),
    ("tiny_mix", ["data.blend={math:-1,code:1}"], "data.blend.math=-1.0: must be a positive number"),
    ("tiny_expert", ["data.valid=[law]"], "no domain 'law'; known: code, math"),
    ("tiny_expert", ["data.seq_length=65"], "data.seq_length=65: must lie between 2 and the model's"),
    ("tiny_expert", ["data.seq_length=1"], "data.seq_length=1: must lie between 2 and the model's"),
    ("tiny_expert", ["init_from=null", FRESH % "vocab_size:200"], "its tokenizer has 257 ids, the model 200"),
    ("tiny_expert", ["data.path={tmp}/damaged"], "{tmp}/damaged/math/train.bin"),
    ("tiny_expert", ["tokenizer={tmp}/empty"], "tokenizer={tmp}/empty: no tokenizer there"),
    # the run directory
    ("tiny_expert", ["out={tmp}/foreign"], "out={tmp}/foreign: exists and is no run directory"),
    ("tiny_expert", ["out={tmp}/file"], "out={tmp}/file: exists and is no run directory"),
    # what trains
    ("tiny_router", ["train=[]"], "embedding.word_embeddings.weight: would train, but stage=router trains routers"),
    ("tiny_expert", ["data.kind=chat"], "data.path={data}: has no chat, which this stage trains on (data.kind=chat)"),
    ("tiny_expert", ["data.kind=video"], "data.kind=video: unknown; known: text, chat"),
    ("tiny_expert", ["stage=sft"], "stage=sft: trains on chats, but all in data.path={data} is text; give stage="),
    (
        "tiny_mix",
        ["init_from=null", FRESH % f"vocab_size:288,{MOE % (2, 'top_k')}", "train=[*.local_experts.4.*]"],
        "train: '*.local_experts.4.*' matches no parameter",
    ),
    ("tiny_expert", ["freeze=[no.such]"], "freeze: 'no.such' matches no parameter; names look like"),
    ("tiny_expert", ['freeze=["*"]'], "leaves nothing to train"),
]


@pytest.fixture(scope="module")
def wrong(world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Things that are not what a run needs."""
    tmp = tmp_path_factory.mktemp("wrong")
    (tmp / "empty").mkdir()
    (tmp / "foreign").mkdir()
    (tmp / "foreign" / "thesis.tex").write_text("years of work")
    (tmp / "file").write_text("a file")
    shutil.copytree(world.data, tmp / "damaged")
    os.truncate(tmp / "damaged" / "math" / "train.bin", 100)
    shutil.copytree(world.data / "math", chat_domain(tmp / "chats", "code", 12) / "math")
    shutil.copytree(world.dense, tmp / "cut")
    os.truncate(tmp / "cut" / "model.safetensors", 2000)
    shutil.copytree(world.mixture, tmp / "greedy")
    settings = json.loads((tmp / "greedy" / "config.json").read_text())
    (tmp / "greedy" / "config.json").write_text(json.dumps({**settings, "num_experts_per_tok": 9}))
    return tmp


def tree(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}


@pytest.mark.parametrize(("config", "overrides", "message"), CASES, ids=[" ".join(c[1])[:40] for c in CASES])
def test_a_mistake_is_one_line(
    world: TinyWorld,
    commands: CommandServer,
    wrong: Path,
    tmp_path: Path,
    config: str,
    overrides: list[str],
    message: str,
) -> None:
    places = {"{tmp}": wrong, "{data}": world.data, "{dense}": world.dense, "{mixture}": world.mixture}

    def placed(text: str) -> str:
        for name, place in places.items():
            text = text.replace(name, str(place))
        return text

    before = tree(wrong)
    arguments = world.arguments(config, tmp_path / "run")
    ended = commands.run(*arguments, *map(placed, overrides), cwd=tmp_path)
    assert ended.code == 2, ended.err
    assert ended.err.startswith("btx-nemo train: ")
    assert ended.err.count("\n") == 1
    assert ended.err.endswith("\n")
    assert placed(message) in ended.err
    assert ended.out == ""
    assert list(tmp_path.iterdir()) == []
    assert tree(wrong) == before


def test_the_same_from_a_fresh_interpreter(world: TinyWorld, tmp_path: Path) -> None:
    """Importing Megatron says much of itself: none of it comes between."""
    ended = run_module(*world.arguments("tiny_expert", tmp_path / "run", freeze="[no.such]"))
    assert ended.code == 2
    assert ended.err.startswith("btx-nemo train: freeze: ")
    assert ended.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ("[no.such]", "'no.such' matches no parameter"),
        pytest.param('["*"]', "['*'] leaves nothing to train", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_say_it_once(world: TinyWorld, tmp_path: Path, patterns: str, message: str) -> None:
    arguments = world.arguments("tiny_mix", tmp_path / "run", freeze=patterns, layout__ep=2)
    ended = run_module(*arguments, launcher=torchrun(2))
    assert ended.code != 0
    assert ended.err.count(f"btx-nemo train: freeze: {message}") == 1
    assert "exitcode  : 2" in ended.err
    assert not (tmp_path / "run").exists()


def test_a_rank_that_is_wrong_alone_says_so(world: TinyWorld, commands: CommandServer, tmp_path: Path) -> None:
    """A folder that is missing on one node only, say."""
    first, second = (
        commands.start(
            *world.arguments("tiny_expert", tmp_path / "run", data__path=data),
            env={"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
        )
        for rank, data in enumerate((world.data, tmp_path / "missing"))
    )
    ended = second.wait()
    first.kill()
    first.wait()
    assert ended.code == 2
    assert ended.err.count("\n") == 1
    assert ended.err.endswith("(rank 1)\n")


def test_a_setting_that_is_newer_than_a_run_had_its_default(
    world: TinyWorld, commands: CommandServer, tmp_path: Path
) -> None:
    arguments = world.arguments("tiny_expert", tmp_path / "run", steps=0, optim__warmup_steps=0, export="false")
    assert commands.run(*arguments).code == 0
    resolved = tmp_path / "run" / "resolved.yaml"
    lines = resolved.read_text().splitlines(keepends=True)
    resolved.write_text("".join(line for line in lines if "  eps:" not in line and "document_mask:" not in line))
    again = commands.run(*arguments)
    assert again.code == 0, again.err
    for override, told in (
        ("optim.eps=1e-6", "was started with optim.eps=1e-08, now optim.eps=1e-06"),
        ("micro_batch_size=1", "was started with micro_batch_size=2, now micro_batch_size=1"),
    ):
        other = commands.run(*arguments, override)
        assert other.code == 2 and told in other.err
