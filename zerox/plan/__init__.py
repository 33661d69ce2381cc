"""Plans: integers and enums, frozen, no tensors. Imports the standard library only."""
