deepspeed --module openrlhf.cli.train_ppo_ray --pretrain models/tiny --prompt_data rows.jsonl \
   --remote_rm_url http://127.0.0.1:5000/score --advantage_estimator group_norm --no_advantage_std_norm \
   --lora_rank 16 --lora_alpha 32 --target_modules q_proj v_proj --rollout_batch_size 16 --n_samples_per_prompt 4 \
   --train_batch_size 64 --temperature 0.8 --top_p 0.9 --seed 5 --vllm_num_engines 1 --vllm_gpu_memory_utilization 0.5 \
   --eval_dataset held.jsonl --eval_steps 10 --eval_temperature 0.6 --eval_n_samples_per_prompt 4 --init_kl_coef 0
