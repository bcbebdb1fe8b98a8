"""Words that people search for, by page: phrases, separated by commas. A phrase counts like a heading of the page."""

KEYWORDS = {
    "index": "per-sample gradients, per-example gradients, per-instance gradients, PyTorch",
    "installation": "install, pip, conda, requirements, CPU, CUDA, GPU",
    "quick-start": "getting started, introduction, hello world, first example, notebook, Jupyter, Colab, tabular data",
    "questions": "FAQ, how do I, overview, which function",
    "tutorials/first-hour": "notebook, Jupyter, IPython, Colab, ipynb, VS Code, beginner, getting started",
    "tutorials/wrong-labels": "noisy labels, label noise, mislabeled data, data cleaning, confident learning, outliers",
    "tutorials/accumulation": "gradient accumulation, accumulate gradients, effective batch size, large batch, "
    "minibatch, mini-batch, resume training",
    "tutorials/private-training": "DP-SGD, DPSGD, differential privacy, privacy budget, epsilon",
    "tutorials/dp-lora": "DP-SGD, LoRA, peft, private fine-tuning, membership inference, Trainer, SFTTrainer, TRL",
    "tutorials/influence": "influence functions, data attribution, explain prediction, training data attribution",
    "tutorials/lora": "fine-tuning, language model, LLM, LoRA, peft, transformers, instruction tuning, SFT",
    "tutorials/preferences": "DPO, direct preference optimization, RLHF, preference data, reward model, TRL",
    "tutorials/one-sample": "one sample at a time, online learning, single sample, batch size 1, streaming, stream, "
    "incremental learning, continual learning, stochastic gradient descent",
    "tutorials/gpu-report": "GPU, CUDA, ROCm, Colab, Kaggle, free GPU, notebook, T4, benchmark",
    "tutorials/users": "federated, user-level, per-user, group, personalization, class imbalance",
    "concepts": "how it works, per-example gradient, ghost clipping, ghost norm, autograd graph, Jacobian",
    "guarantees": "correctness, tests, exact",
    "how-to": "recipes, BatchNorm, Expected more than 1 value per channel when training, GAN, mixup, contrastive, "
    "multi-task, curriculum learning, hard example mining",
    "snippets": "mistakes, common errors, training loop, NumPy, GradientTape, TensorFlow, no_grad, zero_grad, "
    "grad can be implicitly created only for scalar outputs, train on a single sample, steps by batch size, "
    "gradients for each instance of a minibatch, flexible training loop, loop by batch size",
    "audit": "check a training loop, verify training, test a training loop, debug training, loss not decreasing, "
    "pytest, gradient accumulation bug, num_items_in_batch, weight of each token, token weighting, mean of means, "
    "loss normalization, batch size invariance, resume, sanity check",
    "batch-size": "batch size schedule, batch size warmup, batch size ramp-up, rampup, dynamic batch size, adaptive "
    "batch, critical batch size, gradient noise scale, increase the batch size, learning rate by samples or tokens",
    "audit-tutorial-loops": "mistakes, training loop tutorial, gradient accumulation, accumulation_steps, last batch, "
    "idx % n == 0, model.eval, model.train, requires_grad_, element 0 of tensors does not require grad, zero_grad, "
    "clip_grad_norm_, GradScaler, unscale_, scheduler.step, len(train_loader), padding mask, mean loss, "
    "BatchNorm batch size 1, fine-tuning head, model does not learn, loss does not decrease",
    "gradients": "per-sample gradient, per-example gradients, per-instance gradients, individual gradients, "
    "minibatch, functorch, vmap, Jacobian, saliency, saliency map, input gradient, Hessian-vector product, "
    "gradient norm, gradient of each sample, neural tangent kernel, NTK, freeze layers",
    "step": "optimizer step, training loop, minibatch, mini-batch, batch size, microbatch, mixed precision, AMP, bf16, "
    "steps by batch size, loop by batch size, gradient accumulation",
    "transforms": "gradient clipping, per-sample clipping, sample weights, reweighting, importance weighting, "
    "class imbalance, imbalanced data, class weights, hard example mining, focal loss, noisy labels",
    "trainer": "fit, callbacks, checkpoint, early stopping, validation, progress bar, notebook, Jupyter, Catalyst, "
    "Ignite, training loop, S3, GCS, object storage, cloud storage, fsspec, upload",
    "integrations": "Hugging Face, transformers Trainer, TRL, peft, Lightning, PyTorch Lightning, Accelerate, Fabric, "
    "Keras, TensorFlow, JAX, GradientTape, custom training loop",
    "privacy": "DP-SGD, differential privacy, epsilon, delta, Renyi, accountant, Poisson sampling, Opacus",
    "diagnostics": "gradient noise scale, critical batch size, wrong labels, noisy labels, label noise, mislabeled, "
    "outliers, Fisher information, pruning, similarity, hard examples",
    "attribution": "influence functions, data attribution, TRAK, EK-FAC, TracIn, explain prediction, coreset, "
    "metagradient, MAGIC, REPLAY, unrolled differentiation, data valuation",
    "diagnostics-measurements": "benchmark, cleanlab, average precision, label noise",
    "attribution-measurements": "benchmark, linear datamodeling score, LDS, kronfluence, traker",
    "dynamics": "dataset cartography, data map, forgetting events, example forgetting, AUM, area under the margin, "
    "EL2N, GraNd, noisy labels, label noise, cleanlab, confident learning, data pruning, coreset, memorization",
    "ledger": "per-sample loss, training dynamics, dataset cartography, forgetting events, log loss of each sample, "
    "Parquet, pandas",
    "report": "HTML report, dashboard, visualization, plots, wandb, TensorBoard",
    "compile": "torch.compile, speed, fast small networks, overhead, tabular data, online learning",
    "clusters": "SLURM, sbatch, srun, Kubernetes, k8s, preemption, preemptible, spot instances, SIGTERM, requeue, "
    "terminationGracePeriodSeconds, multi-node, HPC, S3, object store",
    "distributed": "DDP, FSDP, multi-GPU, torchrun, data parallel, NCCL, gloo",
    "accelerators": "GPU, CUDA, MPS, TPU, XPU, host sync",
    "gpu": "GPU, CUDA, ROCm, benchmark, NVIDIA, AMD, A100, H100, T4, tested hardware, TF32, speed on GPU",
    "command-line": "CLI, terminal, doctor, recipe",
    "extending": "custom layer, custom operation, custom transform, plugin",
    "examples": "scripts, sample code, notebook",
    "migration/opacus": "PrivacyEngine, GradSampleModule, make_private, grad_sample",
    "migration/backpack": "BatchGrad, BatchL2Grad, extend",
    "migration/vmap": "functorch, torch.func, functional_call, make_functional, vmap, per-sample-grads tutorial",
    "migration/lightning": "PyTorch Lightning, LightningModule, accumulate_grad_batches",
    "migration/accelerate": "Accelerator, gradient_accumulation_steps",
    "migration/attribution": "captum, TRAK, TracInCP, influence",
    "compatibility": "versions, Python, torch, Windows, macOS, Linux",
    "comparison": "alternatives, versus, Opacus, BackPACK, functorch",
    "speed": "benchmark, performance, overhead, memory, slow, fast",
    "scaling": "communication, several GPUs, benchmark",
    "limitations": "not supported, known issues, when not to use",
}
