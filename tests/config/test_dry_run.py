"""Every file of conf/ is dry-run: all that its command checks before it builds or writes, on tiny models and data."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from btx_testing.chats import chat_domain
from btx_testing.models import make_llama
from btx_testing.runs import SIZES, TinyWorld
from btx_testing.text import byte_tokenizer

from btx_nemo.cli import main
from btx_nemo.config.load import conf_dir, load
from btx_nemo.embed.run import embed_domains
from btx_nemo.mix.config import MixConfig
from btx_nemo.mix.run import run_mix
from test_load import REQUIRED, TRAINING

CONF = conf_dir()
TRAIN = sorted(path.stem for path in (CONF / "train").glob("[!_]*.yaml"))
MIX = sorted(path.stem for path in (CONF / "mix").glob("[!_]*.yaml"))
SUBMIT = sorted(path.stem for path in (CONF / "submit").glob("[!_]*.yaml"))
SMALL = ["data.seq_length=32", "micro_batch_size=1", "optim.warmup_steps=0"]
