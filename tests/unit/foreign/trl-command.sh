accelerate launch --config_file=zero3.yaml --num_processes 8 \
    trl grpo --model_name_or_path models/tiny --dataset_name some/rows --dataset_config main --dtype bfloat16 \
    --learning_rate 1e-6 --max_completion_length 256 --num_generations 4 --per_device_train_batch_size 8 \
    --loss_type sapo --sapo_temperature_pos 1.0 --sapo_temperature_neg 1.05 --importance_sampling_level token \
    --reward_funcs my_lib.rewards.score think_format_reward --use_peft --lora_r 32 --lora_target_modules q_proj v_proj \
    --use_vllm --vllm_mode server --vllm_server_host 127.0.0.1 --vllm_server_port 8001 --gradient_checkpointing \
    --max_steps 100 --eval_strategy no --eval_steps 10 --seed 3 --use_liger_kernel False --attn_implementation sdpa
