"""Our baselines and beliefs in other trainers: TRL's own, verl, SkyRL. Each module imports nothing of its trainer
before it is used."""
