"""Under other libraries' training loops, a module for each; zerox itself imports none of them.

accelerate, transformers, lightning, pytorch_lightning: what users import, one for each
watch: figures of each step; transformers_watch, lightning_watch, pytorch_lightning_watch: for their loggers
lightning_strategies: what both packages of Lightning share
sharding: an optimizer of torch becomes one of zerox; the optimizers of a strategy
on_meta: models on the meta device, which frameworks move first
engines: what frameworks ask of parameters and scalers, asked of zerox's optimizers
requirements: looks at their versions
"""
