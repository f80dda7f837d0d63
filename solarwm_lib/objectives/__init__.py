"""Training objectives; each sees a backbone only through `backbones.protocol.Backbone`."""
