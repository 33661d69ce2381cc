"""What an update rule keeps, and what it reads of a param group.

rule: what a rule is
adam, sgd, lion: the rules with kernels; reference has them in plain torch
muon: the rule of whole matrices; known lists all of these
of_groups: which group has which rule; options_table: the groups as kernels read them
local_optimizer: makes a rule of any optimizer class; probe tries it on tensors of samples, to learn
  what it keeps
"""
