#!/usr/bin/env bash
# BAR without reinforcement learning, small, on this machine: base and anchor, two domains' experts in two stages each,
# the merge, its router, and the export. All in RUNS (default: runs/bar); run again, it does what is left. docs/stages.md
set -euo pipefail
cd "$(dirname "$0")/.."
runs=${RUNS:-runs/bar}
python=${PYTHON:-.venv/bin/python}
export BTX_RUNS=$runs OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} HF_HUB_OFFLINE=1
btx() { "$python" -m btx_nemo "$@"; }
train() { # NAME KEY=VALUE...
    btx train --config-name "$@"
}
mix() { # OUT NAME KEY=VALUE...
    local out=$1
    shift
    [ -e "$out/manifest.json" ] || btx mix --config-name "$@" format=megatron out="$out"
}

# Text for pre- and mid-training, conversations for fine-tuning, one tokenizer.
[ -e "$runs/data/prose/meta.json" ] || btx prepare-data --demo --out "$runs/data"
if [ ! -e "$runs/chats/prose/meta.json" ]; then
    "$python" scripts/bar_chats.py "$runs/data" "$runs/conversations"
    cat >"$runs/template.jinja" <<'TEMPLATE'
{% for message in messages %}<{{ message['role'] }}>
{{ message['content'] }}<|endoftext|>
{% endfor %}{% if add_generation_prompt %}<assistant>
{% endif %}
TEMPLATE
    for domain in math code prose; do
        btx prepare-data "$runs/conversations/$domain.jsonl" --domain $domain --tokenizer "$runs/data/tokenizer" \
            --out "$runs/chats" --chat --chat-template "$runs/template.jinja" --overwrite
    done
fi

# The pre-trained base, and the anchor: the base, post-trained on general conversations.
train tiny_seed data.path="$runs/data" out="$runs/base"
train tiny_sft init_from="$runs/base" data.path="$runs/chats" domain=prose out="$runs/anchor"

# One expert a domain, beside the anchor: mid-training on text, then fine-tuning on conversations.
for domain in math code; do
    mix "$runs/pair-$domain" two_expert seed="$runs/anchor" experts.$domain="$runs/base"
    train tiny_bar_midtrain domain=$domain data.path="$runs/data"
    train tiny_bar_sft domain=$domain data.path="$runs/chats"
done

# The merge, its router on a sample of all domains' conversations, and transformers.
mix "$runs/mix" bar seed="$runs/anchor" experts.math="$runs/expert-math" experts.code="$runs/expert-code"
train tiny_bar_router data.path="$runs/chats" init_from="$runs/mix" out="$runs/router"
btx verify "$runs/router" "$runs/router/hf"
btx inspect "$runs/router"
