set -e
# expert-math: new
# expert-code-py: new
# mix: new
# joint: new
# export: new
# eval: new
export BTX_RUNS='{runs}'
export BTX_SEED='{runs}/seed'
export BTX_ANCHOR='{runs}/seed'
export BTX_DATA='{runs}/data'
export BTX_CHATS='{runs}/chats'
export BTX_PYTHON=/opt/python
mkdir -p '{runs}/logs'
export BTX_LOCAL=1
bash {slurm}/train_expert.sh math --config-name=expert steps=10
bash {slurm}/train_expert.sh code-py --config-name=expert steps=10
bash {slurm}/mix.sh math code-py --config-name=btx
bash {slurm}/train_mix.sh --config-name=mix layout.ep=2
bash {slurm}/export.sh
bash {slurm}/eval.sh
