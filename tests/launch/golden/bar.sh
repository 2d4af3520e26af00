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
job1=$(sbatch --parsable --export=ALL --job-name=btx-data '--output={runs}/logs/%x_%j.out' --comment={digest} --partition=gpu {slurm}/demo_data.sh)
echo "btx-data ${job1}"
job2=$(sbatch --parsable --export=ALL --job-name=btx-chats '--output={runs}/logs/%x_%j.out' --comment={digest} "--dependency=afterok:${job1}" --kill-on-invalid-dep=yes --partition=gpu {slurm}/demo_data.sh chats)
echo "btx-chats ${job2}"
job3=$(sbatch --parsable --export=ALL --job-name=btx-seed '--output={runs}/logs/%x_%j.out' --comment={digest} "--dependency=afterok:${job1}" --kill-on-invalid-dep=yes --gres=none --time=00:30:00 --cpus-per-task=1 --mem=4G --partition=gpu {slurm}/train_seed.sh --config-name=tiny_seed)
echo "btx-seed ${job3}"
job4=$(sbatch --parsable --export=ALL --job-name=btx-anchor '--output={runs}/logs/%x_%j.out' --comment={digest} "--dependency=afterok:${job1}:${job2}:${job3}" --kill-on-invalid-dep=yes --gres=none --time=00:30:00 --cpus-per-task=1 --mem=4G --partition=gpu {slurm}/train_anchor.sh --config-name=tiny_sft domain=prose)
echo "btx-anchor ${job4}"
job5=$(sbatch --parsable --export=ALL --job-name=btx-pair-math '--output={runs}/logs/%x_%j.out' --comment={digest} "--dependency=afterok:${job3}:${job4}" --kill-on-invalid-dep=yes --cpus-per-task=1 --mem=4G --partition=gpu {slurm}/pair.sh math --config-name=two_expert format=megatron)
echo "btx-pair-math ${job5}"
job6=$(sbatch --parsable --export=ALL --job-name=btx-expert-math.mid '--output={runs}/logs/%x_%j.out' --comment={digest} "--dependency=afterok:${job1}:${job2}:${job5}" --kill-on-invalid-dep=yes --gres=none --time=00:30:00 --cpus-per-task=1 --mem=4G --partition=gpu {slurm}/train_expert.sh math.mid --config-name=tiny_bar_midtrain export=false 'init_from='"'"'{runs}/pair-math'"'"'')
echo "btx-expert-math.mid ${job6}"
job7=$(sbatch --parsable --export=ALL --job-name=btx-expert-math '--output={runs}/logs/%x_%j.out' --comment={digest} "--dependency=afterok:${job1}:${job2}:${job6}" --kill-on-invalid-dep=yes --gres=none --time=00:30:00 --cpus-per-task=1 --mem=4G --partition=gpu {slurm}/train_expert.sh math --config-name=tiny_bar_sft export=false 'init_from='"'"'{runs}/expert-math.mid'"'"'')
echo "btx-expert-math ${job7}"
job8=$(sbatch --parsable --export=ALL --job-name=btx-pair-code '--output={runs}/logs/%x_%j.out' --comment={digest} "--dependency=afterok:${job3}:${job4}" --kill-on-invalid-dep=yes --cpus-per-task=1 --mem=4G --partition=gpu {slurm}/pair.sh code --config-name=two_expert format=megatron)
echo "btx-pair-code ${job8}"
job9=$(sbatch --parsable --export=ALL --job-name=btx-expert-code.mid '--output={runs}/logs/%x_%j.out' --comment={digest} "--dependency=afterok:${job1}:${job2}:${job8}" --kill-on-invalid-dep=yes --gres=none --time=00:30:00 --cpus-per-task=1 --mem=4G --partition=gpu {slurm}/train_expert.sh code.mid --config-name=tiny_bar_midtrain export=false 'init_from='"'"'{runs}/pair-code'"'"'')
echo "btx-expert-code.mid ${job9}"
job10=$(sbatch --parsable --export=ALL --job-name=btx-expert-code '--output={runs}/logs/%x_%j.out' --comment={digest} "--dependency=afterok:${job1}:${job2}:${job9}" --kill-on-invalid-dep=yes --gres=none --time=00:30:00 --cpus-per-task=1 --mem=4G --partition=gpu {slurm}/train_expert.sh code --config-name=tiny_bar_sft export=false 'init_from='"'"'{runs}/expert-code.mid'"'"'')
echo "btx-expert-code ${job10}"
job11=$(sbatch --parsable --export=ALL --job-name=btx-pair-tool '--output={runs}/logs/%x_%j.out' --comment={digest} "--dependency=afterok:${job3}:${job4}" --kill-on-invalid-dep=yes --cpus-per-task=1 --mem=4G --partition=gpu {slurm}/pair.sh tool --config-name=two_expert format=megatron)
echo "btx-pair-tool ${job11}"
job12=$(sbatch --parsable --export=ALL --job-name=btx-expert-tool '--output={runs}/logs/%x_%j.out' --comment={digest} "--dependency=afterok:${job1}:${job2}:${job11}" --kill-on-invalid-dep=yes --gres=none --time=00:30:00 --cpus-per-task=1 --mem=4G --partition=gpu {slurm}/train_expert.sh tool --config-name=tiny_bar_sft export=false 'init_from='"'"'{runs}/pair-tool'"'"'')
echo "btx-expert-tool ${job12}"
job13=$(sbatch --parsable --export=ALL --job-name=btx-mix '--output={runs}/logs/%x_%j.out' --comment={digest} "--dependency=afterok:${job4}:${job7}:${job10}:${job12}" --kill-on-invalid-dep=yes --cpus-per-task=1 --mem=4G --partition=gpu {slurm}/mix.sh math code tool --config-name=bar format=megatron)
echo "btx-mix ${job13}"
job14=$(sbatch --parsable --export=ALL --job-name=btx-router '--output={runs}/logs/%x_%j.out' --comment={digest} "--dependency=afterok:${job1}:${job2}:${job13}" --kill-on-invalid-dep=yes --gres=none --time=00:30:00 --cpus-per-task=1 --mem=4G --partition=gpu {slurm}/train_router.sh --config-name=tiny_bar_router)
echo "btx-router ${job14}"
job15=$(sbatch --parsable --export=ALL --job-name=btx-export '--output={runs}/logs/%x_%j.out' --comment={digest} "--dependency=afterok:${job14}" --kill-on-invalid-dep=yes --cpus-per-task=1 --mem=4G --partition=gpu {slurm}/export.sh router)
echo "btx-export ${job15}"
job16=$(sbatch --parsable --export=ALL --job-name=btx-eval '--output={runs}/logs/%x_%j.out' --comment={digest} "--dependency=afterok:${job14}:${job15}" --kill-on-invalid-dep=yes --cpus-per-task=1 --mem=4G --partition=gpu {slurm}/eval.sh router)
echo "btx-eval ${job16}"
