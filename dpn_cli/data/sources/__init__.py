"""Where images and labels come from: folders, the hub, shards, packs, CIFAR files and synthetic scenes."""
