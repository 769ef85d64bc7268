"""The shipped config groups. A Hydra application finds them with `hydra.searchpath: [pkg://fuselayers.configs.groups]`."""
