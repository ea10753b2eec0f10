"""Sources of images and labels: folders, the hub, shards, packs, CIFAR files and synthetic scenes."""
