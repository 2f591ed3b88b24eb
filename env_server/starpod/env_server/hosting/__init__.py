"""Other packages' environments as environments of ours: `starpod serve --gymnasium`, `--openenv`, `--skyrl-gym`."""
