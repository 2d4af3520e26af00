set -e
# data: new
# seed: unfinished
# expert-math: new
# expert-code: new
# expert-prose: new
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
bash {slurm}/demo_data.sh
bash {slurm}/train_seed.sh --config-name=tiny_seed
bash {slurm}/train_expert.sh math --config-name=tiny_expert
bash {slurm}/train_expert.sh code --config-name=tiny_expert
bash {slurm}/train_expert.sh prose --config-name=tiny_expert
bash {slurm}/mix.sh math code prose --config-name=btx
bash {slurm}/train_mix.sh --config-name=tiny_mix
bash {slurm}/export.sh
bash {slurm}/eval.sh
