def draw_all(a, b):
    pass
