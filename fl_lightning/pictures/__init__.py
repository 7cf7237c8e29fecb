"""What the pictures of measurements show, and the one module that draws them. Nothing here imports torch."""

from fl_lightning.pictures.declared import Measured, Panel, Picture, Shown, diagonal, off_diagonal, over

__all__ = ["Measured", "Panel", "Picture", "Shown", "diagonal", "off_diagonal", "over"]
