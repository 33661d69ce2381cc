"""Model and optimizer by parameters' names, as torch.distributed.checkpoint (DCP) saves and loads them at any number
of ranks.

store: save(), load() and latest(); arguments: looks at what these were given
manifest: what makes a folder a checkpoint; place: where it is written, and what may be removed for it
names, entries, groups, masks: what is in it; own_params, unwrapped: of ranks with parameters of their own
saved_state: whether what is there fits; saved_param: what there is of one parameter
saved_rows: says how each part of a bucket's state comes from the file, and then does so; saved_tables: of tables
blocks: 8-bit state whose blocks were counted otherwise
parts: runs DCP's planner over zerox's group; everyone: lets ranks fail together
reader: trusts no file; records: reads elements into their place; writer: needs memory for one tensor
weights: load_weights(); weight_files: where tensors lie in which files; safetensors_file, torch_file: in one of these
weight_names: which of them becomes what of the model, weight_places: or a part of it; pretrained_names: as
  transformers says
weight_parts: which rectangles of that are this rank's
weight_reader: reads these; loaded_weights: and then brings them to all who need them
weight_saving: save_weights(); weight_plan: which files it writes; weight_writer: how; weight_folder: where
convert: makes other files of it; from_torch: reads torch's
"""

from zerox.checkpoint.manifest import CheckpointError
from zerox.checkpoint.place import remove
from zerox.checkpoint.store import latest, load, save
from zerox.checkpoint.weight_saving import save_weights
from zerox.checkpoint.weights import load_weights

__all__ = ["CheckpointError", "latest", "load", "load_weights", "remove", "save", "save_weights"]
