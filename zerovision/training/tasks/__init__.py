"""What a training learns: one class per image, several classes, features by comparison, or a teacher's outputs."""
