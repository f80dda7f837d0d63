"""The networks: diffusers' own classes plus what camera control adds to them."""
