from pathlib import Path


def test_every_picture_has_its_data() -> None:
    plots = Path(__file__).parents[2] / "plots"
    pictures = [path for kind in ("png", "svg") for path in plots.rglob(f"*.{kind}")]
    assert pictures
    for picture in pictures:
        # NAME.png or NAME.svg; several pictures of the same data have longer names: NAME_forward_float32.svg.
        data = [path.stem for kind in ("json", "csv") for path in picture.parent.glob(f"*.{kind}")]
        assert any(picture.stem == name or picture.stem.startswith(f"{name}_") for name in data), picture
