"""What the files of conf/ leave to the user."""

from __future__ import annotations

_RATES = ["optim.lr=1", "optim.min_lr=1", "optim.warmup_steps=0", "optim.weight_decay=0"]
TRAINING = {
    **{name: ["domain=math"] for name in ("expert", "tiny_expert", "divmoe_stage1", "nexus_expert")},
    **{name: ["domain=math"] for name in ("tiny_bar_midtrain", "tiny_bar_sft")},
    **{name: ["global_batch_size=4"] for name in ("bar_router", "flexolmo_router")},
    "router": ["steps=1"],
    "divmoe_stage3": ["tokens=1e3"],
    "nexus_extend": ["data.blend={math:1}"],
    "sft": ["optim.lr=1", "global_batch_size=4"],
    "flexolmo_expert": ["domain=math", "global_batch_size=4"],
    "bar_midtrain": ["domain=math", "global_batch_size=4", "tokens=1e3", *_RATES],
    "bar_sft": ["domain=math", "global_batch_size=4", *_RATES],
}
BAR = [
    *(f"expert.set.{word}" for word in TRAINING["bar_sft"][1:]),
    *(f"expert.stages.mid.set.{word}" for word in TRAINING["bar_midtrain"][1:]),
    "router.set.global_batch_size=4",
]
"""What conf/submit/bar.yaml asks for, beside the anchor."""
PIPELINES = {
    "pipeline": ["math", "code"],
    "bar": ["math", "code", "experts.code.stages.mid=null", "anchor=a", *BAR],
    "flexolmo": ["math", "code", "news", "expert.set.global_batch_size=4", "router.set.global_batch_size=4"],
}
REQUIRED = {
    **TRAINING,
    **{name: ["out=o"] for name in ("sparse_upcycling", "nvidia_upcycling", "drop_upcycling", "from_scratch")},
    **{name: ["experts.math=m", "out=o"] for name in ("btx", "divmoe", "two_expert", "flexolmo", "bar", "bam")},
    **{name: ["experts.math=m", "out=o"] for name in ("average", "task_arithmetic", "ties", "dare")},
    **{name: ["in=i", "experts.math=m", "out=o"] for name in ("add", "upgrade")},
    "nexus": ["experts.math=m", "out=o", "embeddings=e"],
    "remove": ["in=i", "out=o", "names=[math]"],
    "extend": ["in=i", "experts.math=m", "out=o", "embeddings=e"],
}
