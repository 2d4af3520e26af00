set -e
# data: new
# chats: new
# seed: unfinished
# anchor: new
# pair-math: new
# expert-math.mid: new
# expert-math: new
# pair-code: new
# expert-code.mid: new
# expert-code: new
# pair-tool: new
# expert-tool: new
# mix: new
# router: new
# export: new
# eval: new
export BTX_RUNS='{runs}'
export BTX_SEED='{runs}/seed'
export BTX_ANCHOR='{runs}/anchor'
export BTX_DATA='{runs}/data'
export BTX_CHATS='{runs}/chats'
export BTX_PYTHON=/opt/python
mkdir -p '{runs}/logs'
export BTX_LOCAL=1
bash {slurm}/demo_data.sh
bash {slurm}/demo_data.sh chats
bash {slurm}/train_seed.sh --config-name=tiny_seed
bash {slurm}/train_anchor.sh --config-name=tiny_sft domain=prose
bash {slurm}/pair.sh math --config-name=two_expert format=megatron
bash {slurm}/train_expert.sh math.mid --config-name=tiny_bar_midtrain export=false 'init_from='"'"'{runs}/pair-math'"'"''
bash {slurm}/train_expert.sh math --config-name=tiny_bar_sft export=false 'init_from='"'"'{runs}/expert-math.mid'"'"''
bash {slurm}/pair.sh code --config-name=two_expert format=megatron
bash {slurm}/train_expert.sh code.mid --config-name=tiny_bar_midtrain export=false 'init_from='"'"'{runs}/pair-code'"'"''
bash {slurm}/train_expert.sh code --config-name=tiny_bar_sft export=false 'init_from='"'"'{runs}/expert-code.mid'"'"''
bash {slurm}/pair.sh tool --config-name=two_expert format=megatron
bash {slurm}/train_expert.sh tool --config-name=tiny_bar_sft export=false 'init_from='"'"'{runs}/pair-tool'"'"''
bash {slurm}/mix.sh math code tool --config-name=bar format=megatron
bash {slurm}/train_router.sh --config-name=tiny_bar_router
bash {slurm}/export.sh router
bash {slurm}/eval.sh router
