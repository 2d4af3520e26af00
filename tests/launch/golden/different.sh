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
job1=$(sbatch --parsable --export=ALL --job-name=btx-expert-math '--output={runs}/logs/%x_%j.out' --comment={digest} --nodes=4 --partition=gpu {slurm}/train_expert.sh math --config-name=expert optim.lr=5e-05)
echo "btx-expert-math ${job1}"
job2=$(sbatch --parsable --export=ALL --job-name=btx-expert-code.mid '--output={runs}/logs/%x_%j.out' --comment={digest} --partition=gpu {slurm}/train_expert.sh code.mid --config-name=expert steps=7)
echo "btx-expert-code.mid ${job2}"
job3=$(sbatch --parsable --export=ALL --job-name=btx-expert-code '--output={runs}/logs/%x_%j.out' --comment={digest} "--dependency=afterok:${job2}" --kill-on-invalid-dep=yes --time=08:00:00 --partition=gpu {slurm}/train_expert.sh code --config-name=expert 'init_from='"'"'{runs}/expert-code.mid/hf'"'"'')
echo "btx-expert-code ${job3}"
job4=$(sbatch --parsable --export=ALL --job-name=btx-mix '--output={runs}/logs/%x_%j.out' --comment={digest} "--dependency=afterany:${job1}:${job3}" --kill-on-invalid-dep=yes --partition=gpu {slurm}/mix.sh math code --allow-missing --config-name=btx top_k=1)
echo "btx-mix ${job4}"
job5=$(sbatch --parsable --export=ALL --job-name=btx-router '--output={runs}/logs/%x_%j.out' --comment={digest} "--dependency=afterok:${job4}" --kill-on-invalid-dep=yes --partition=gpu {slurm}/train_router.sh --config-name=router)
echo "btx-router ${job5}"
job6=$(sbatch --parsable --export=ALL --job-name=btx-joint '--output={runs}/logs/%x_%j.out' --comment={digest} "--dependency=afterok:${job5}" --kill-on-invalid-dep=yes --partition=gpu {slurm}/train_mix.sh router --config-name=mix 'note='"'"'a $(x)'"'"'')
echo "btx-joint ${job6}"
job7=$(sbatch --parsable --export=ALL --job-name=btx-export '--output={runs}/logs/%x_%j.out' --comment={digest} "--dependency=afterok:${job6}" --kill-on-invalid-dep=yes --partition=gpu {slurm}/export.sh)
echo "btx-export ${job7}"
job8=$(sbatch --parsable --export=ALL --job-name=btx-eval '--output={runs}/logs/%x_%j.out' --comment={digest} "--dependency=afterok:${job6}:${job7}" --kill-on-invalid-dep=yes --partition=gpu {slurm}/eval.sh)
echo "btx-eval ${job8}"
