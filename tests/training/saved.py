"""The tensors of a checkpoint, whatever wrote it."""

import torch
import torch.distributed.checkpoint as dcp


def saved_tensors(path):
    """Name -> tensor, weights and optimiser state, of the checkpoint at `path`."""
    reader = dcp.FileSystemReader(path)
    tensors = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in reader.read_metadata().state_dict_metadata.items()
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors
