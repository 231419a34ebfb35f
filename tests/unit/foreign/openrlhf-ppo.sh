python3 -m openrlhf.cli.train_ppo_ray --pretrain models/tiny --reward_pretrain models/judge --save_path runs/rlhf \
   --ref_num_nodes 1 --ref_num_gpus_per_node 2 --critic_num_gpus_per_node 2 --actor_num_gpus_per_node 2 \
   --prompt_data some/rows --input_key context_messages --apply_chat_template --max_samples 1000 \
   --prompt_max_len 512 --generate_max_len 512 --rollout_batch_size 64 --micro_rollout_batch_size 8 \
   --train_batch_size 32 --max_epochs 1 --num_episodes 1 --zero_stage 3 --bf16 --flash_attn --adam_offload \
   --actor_learning_rate 5e-7 --critic_learning_rate 9e-6 --init_kl_coef 0.01 --kl_estimator k1 --gamma 1.0 --lambd 0.95 \
   --eps_clip 0.2 --value_clip 0.2 --normalize_reward --gradient_checkpointing --packing_samples --lr_warmup_ratio 0.03 \
   --colocate_all_models --use_wandb KEY --wandb_run_name e
