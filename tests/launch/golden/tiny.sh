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
job1=$(sbatch --parsable --export=ALL --job-name=btx-data '--output={runs}/logs/%x_%j.out' --comment={digest} --partition=gpu {slurm}/demo_data.sh)
echo "btx-data ${job1}"
job2=$(sbatch --parsable --export=ALL --job-name=btx-seed '--output={runs}/logs/%x_%j.out' --comment={digest} "--dependency=afterok:${job1}" --kill-on-invalid-dep=yes --gres=none --time=00:30:00 --cpus-per-task=1 --mem=4G --partition=gpu {slurm}/train_seed.sh --config-name=tiny_seed)
echo "btx-seed ${job2}"
job3=$(sbatch --parsable --export=ALL --job-name=btx-experts '--output={runs}/logs/%x_%A_%a.out' --comment={digest} --array=0-2 "--dependency=afterok:${job1}:${job2}" --kill-on-invalid-dep=yes --gres=none --time=00:30:00 --cpus-per-task=1 --mem=4G --partition=gpu {slurm}/train_expert.sh math code prose --config-name=tiny_expert)
echo "btx-experts ${job3}"
job4=$(sbatch --parsable --export=ALL --job-name=btx-mix '--output={runs}/logs/%x_%j.out' --comment={digest} "--dependency=afterok:${job2}:${job3}_0:${job3}_1:${job3}_2" --kill-on-invalid-dep=yes --cpus-per-task=1 --mem=4G --partition=gpu {slurm}/mix.sh math code prose --config-name=btx)
echo "btx-mix ${job4}"
job5=$(sbatch --parsable --export=ALL --job-name=btx-joint '--output={runs}/logs/%x_%j.out' --comment={digest} "--dependency=afterok:${job1}:${job4}" --kill-on-invalid-dep=yes --gres=none --time=00:30:00 --cpus-per-task=1 --mem=4G --partition=gpu {slurm}/train_mix.sh --config-name=tiny_mix)
echo "btx-joint ${job5}"
job6=$(sbatch --parsable --export=ALL --job-name=btx-export '--output={runs}/logs/%x_%j.out' --comment={digest} "--dependency=afterok:${job5}" --kill-on-invalid-dep=yes --cpus-per-task=1 --mem=4G --partition=gpu {slurm}/export.sh)
echo "btx-export ${job6}"
job7=$(sbatch --parsable --export=ALL --job-name=btx-eval '--output={runs}/logs/%x_%j.out' --comment={digest} "--dependency=afterok:${job5}:${job6}" --kill-on-invalid-dep=yes --cpus-per-task=1 --mem=4G --partition=gpu {slurm}/eval.sh)
echo "btx-eval ${job7}"
