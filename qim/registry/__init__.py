"""ShardRegistry: who owns which shard, bucket or partition, under which epoch (§5.3.7, §19.2)."""
