"""What a training step needs, before anything is started: memory and communication of a rank, layouts that fit."""
