"""Under other libraries' training loops, a module for each; zerox itself imports none of them.

accelerate, transformers, lightning, pytorch_lightning: what users import
lightning_strategies, lightning_figures: what both packages of Lightning share
watch: keeps figures of steps; transformers_watch, lightning_watch, pytorch_lightning_watch: for their loggers
from_torch: makes an optimizer of torch zerox's; sharding: a strategy's optimizers; buffers: handed out as DDP does
engines: answers what they ask of parameters; scalers: their loss scalers; local_sgd: refuses what averages parameters
requirements: looks at their versions
"""
