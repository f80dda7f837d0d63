"""Raw clips into stored latents: the encoder contract, content keys, shards of one part, and the index over all parts."""
