"""The colors of the figures' lines; the page has its own for dark rooms (templates/page.css)."""

from typing import Final

SERIES: Final = (
    "#0072b2",
    "#c44e00",
    "#00805d",
    "#a8327d",
    "#8a6a00",
    "#2b8cbe",
    "#6b4fbb",
    "#6b7280",
)
"""Line colors: Okabe and Ito's palette, darkened where it has too little contrast on white."""
