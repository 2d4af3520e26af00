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
job1=$(sbatch --parsable --export=ALL --job-name=btx-experts '--output={runs}/logs/%x_%A_%a.out' --comment={digest} --array=0-1 --gres=gpu:4 --partition=gpu {slurm}/train_expert.sh math code-py --config-name=expert steps=10)
echo "btx-experts ${job1}"
job2=$(sbatch --parsable --export=ALL --job-name=btx-mix '--output={runs}/logs/%x_%j.out' --comment={digest} "--dependency=afterok:${job1}_0:${job1}_1" --kill-on-invalid-dep=yes --partition=gpu {slurm}/mix.sh math code-py --config-name=btx)
echo "btx-mix ${job2}"
job3=$(sbatch --parsable --export=ALL --job-name=btx-joint '--output={runs}/logs/%x_%j.out' --comment={digest} "--dependency=afterok:${job2}" --kill-on-invalid-dep=yes --partition=gpu {slurm}/train_mix.sh --config-name=mix layout.ep=2)
echo "btx-joint ${job3}"
job4=$(sbatch --parsable --export=ALL --job-name=btx-export '--output={runs}/logs/%x_%j.out' --comment={digest} "--dependency=afterok:${job3}" --kill-on-invalid-dep=yes --partition=gpu {slurm}/export.sh)
echo "btx-export ${job4}"
job5=$(sbatch --parsable --export=ALL --job-name=btx-eval '--output={runs}/logs/%x_%j.out' --comment={digest} "--dependency=afterok:${job3}:${job4}" --kill-on-invalid-dep=yes --partition=gpu {slurm}/eval.sh)
echo "btx-eval ${job5}"
