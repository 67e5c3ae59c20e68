from jaxcomp.transforms import fragments as fragments
