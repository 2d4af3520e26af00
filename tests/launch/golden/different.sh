set -e
# expert-math: new
# expert-code.mid: new
# expert-code: new
# mix: new
# router: new
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
bash {slurm}/train_expert.sh math --config-name=expert optim.lr=5e-05 || echo 'expert-math failed' >&2
bash {slurm}/train_expert.sh code.mid --config-name=expert steps=7 || echo 'expert-code.mid failed' >&2
bash {slurm}/train_expert.sh code --config-name=expert 'init_from='"'"'{runs}/expert-code.mid'"'"'' || echo 'expert-code failed' >&2
bash {slurm}/mix.sh math code --allow-missing --config-name=btx top_k=1
bash {slurm}/train_router.sh --config-name=router
bash {slurm}/train_mix.sh router --config-name=mix 'note='"'"'a $(x)'"'"''
bash {slurm}/export.sh
bash {slurm}/eval.sh
