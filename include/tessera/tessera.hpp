/// All of Tessera's host side. Each header is as usable alone, and a program that needs a few of them
/// compiles faster with those. Headers that need another library are empty unless TESSERA_WITH_MPI,
/// TESSERA_WITH_JSON and their like say that it is there.
///
/// Made by tests/house/make_single_header.py.
#ifndef TESSERA_TESSERA_HPP
#define TESSERA_TESSERA_HPP

#include <tessera/core/abi.hpp>
#include <tessera/core/arena.hpp>
#include <tessera/core/error.hpp>
#include <tessera/core/extents.hpp>
#include <tessera/core/memory.hpp>
#include <tessera/core/memory_span.hpp>
#include <tessera/core/philox.hpp>
#include <tessera/core/scalar.hpp>
#include <tessera/core/tensor.hpp>
#include <tessera/core/version.hpp>
#include <tessera/core/view.hpp>

#include <tessera/layout/mesh_shape.hpp>
#include <tessera/layout/ownership.hpp>
#include <tessera/layout/parameters.hpp>
#include <tessera/layout/schedule.hpp>
#include <tessera/layout/schedule_simulator.hpp>
#include <tessera/layout/sequence_shards.hpp>
#include <tessera/layout/shard.hpp>

#include <tessera/exec/copy.hpp>
#include <tessera/exec/copy_cuda.hpp>
#include <tessera/exec/cuda.hpp>
#include <tessera/exec/cuda_memory.hpp>
#include <tessera/exec/event.hpp>
#include <tessera/exec/graph.hpp>
#include <tessera/exec/host.hpp>
#include <tessera/exec/range.hpp>
#include <tessera/exec/scratch.hpp>
#include <tessera/exec/space.hpp>

#include <tessera/ops/add.hpp>
#include <tessera/ops/attention.hpp>
#include <tessera/ops/cast.hpp>
#include <tessera/ops/copy_rows.hpp>
#include <tessera/ops/cross_entropy.hpp>
#include <tessera/ops/dropout.hpp>
#include <tessera/ops/elementary.hpp>
#include <tessera/ops/embedding.hpp>
#include <tessera/ops/gelu.hpp>
#include <tessera/ops/layer_norm.hpp>
#include <tessera/ops/linear.hpp>
#include <tessera/ops/linear_cross_entropy.hpp>
#include <tessera/ops/linear_swiglu.hpp>
#include <tessera/ops/matmul.hpp>
#include <tessera/ops/merge_attention.hpp>
#include <tessera/ops/random_normal.hpp>
#include <tessera/ops/reduce.hpp>
#include <tessera/ops/rms_norm.hpp>
#include <tessera/ops/rotary.hpp>
#include <tessera/ops/scale.hpp>
#include <tessera/ops/shapes.hpp>
#include <tessera/ops/sliced_cross_entropy.hpp>
#include <tessera/ops/swiglu.hpp>
#include <tessera/ops/token_positions.hpp>

#include <tessera/comm/communicator.hpp>
#include <tessera/comm/self.hpp>
#include <tessera/comm/threads.hpp>
#if defined(TESSERA_WITH_MPI)
#include <tessera/comm/mpi.hpp>
#endif
#if defined(TESSERA_WITH_NCCL)
#include <tessera/comm/nccl.hpp>
#endif

#include <tessera/partition/arithmetic.hpp>
#include <tessera/partition/box.hpp>
#include <tessera/partition/mesh.hpp>
#include <tessera/partition/partitioned_tensor.hpp>
#include <tessera/partition/placements.hpp>
#include <tessera/partition/plan.hpp>
#include <tessera/partition/redistribute.hpp>

#include <tessera/io/atomic_file.hpp>
#include <tessera/io/checksum.hpp>
#include <tessera/io/commit.hpp>
#include <tessera/io/folder.hpp>
#include <tessera/io/folder_lock.hpp>
#include <tessera/io/json.hpp>
#include <tessera/io/manifest.hpp>
#include <tessera/io/mapped_file.hpp>
#include <tessera/io/safetensors.hpp>
#include <tessera/io/safetensors_writer.hpp>
#include <tessera/io/tensor_entry.hpp>

#include <tessera/data/bytes.hpp>
#include <tessera/data/fingerprint.hpp>
#include <tessera/data/prepare.hpp>
#include <tessera/data/prepare_sentencepiece.hpp>
#include <tessera/data/sampler.hpp>
#include <tessera/data/sentencepiece.hpp>
#include <tessera/data/text_statistics.hpp>
#include <tessera/data/token_dataset.hpp>
#include <tessera/data/token_file.hpp>
#include <tessera/data/token_view.hpp>
#include <tessera/data/tokenizer.hpp>

#include <tessera/optim/adamw.hpp>
#include <tessera/optim/decay.hpp>
#include <tessera/optim/flat_update.hpp>
#include <tessera/optim/optimizer.hpp>
#include <tessera/optim/schedule.hpp>
#include <tessera/optim/sgd.hpp>

#include <tessera/nn/decoder.hpp>
#include <tessera/nn/embedding.hpp>
#include <tessera/nn/feed_forward.hpp>
#include <tessera/nn/head.hpp>
#include <tessera/nn/initialise.hpp>
#include <tessera/nn/make_transformer.hpp>
#include <tessera/nn/model.hpp>
#include <tessera/nn/norm.hpp>
#include <tessera/nn/parameter_store.hpp>
#include <tessera/nn/rank_group.hpp>
#include <tessera/nn/self_attention.hpp>
#include <tessera/nn/tensor_part.hpp>
#include <tessera/nn/transformer_block.hpp>
#include <tessera/nn/transformer_config.hpp>
#include <tessera/nn/unit.hpp>

#include <tessera/parallel/block_lender.hpp>
#include <tessera/parallel/buckets.hpp>
#include <tessera/parallel/context_attention.hpp>
#include <tessera/parallel/context_options.hpp>
#include <tessera/parallel/data_parallel.hpp>
#include <tessera/parallel/distributed_model.hpp>
#include <tessera/parallel/flat_model.hpp>
#include <tessera/parallel/global_norm.hpp>
#include <tessera/parallel/layout_text.hpp>
#include <tessera/parallel/loss.hpp>
#include <tessera/parallel/memory_plan.hpp>
#include <tessera/parallel/model_group.hpp>
#include <tessera/parallel/overlapped_linear.hpp>
#include <tessera/parallel/pipeline.hpp>
#include <tessera/parallel/ring_attention.hpp>
#include <tessera/parallel/sequence_exchange.hpp>
#include <tessera/parallel/training_layout.hpp>
#include <tessera/parallel/unit_runner.hpp>
#include <tessera/parallel/zero.hpp>
#include <tessera/parallel/zero_options.hpp>

#include <tessera/train/agreement.hpp>
#include <tessera/train/checkpoint.hpp>
#include <tessera/train/command_line.hpp>
#include <tessera/train/corpus.hpp>
#include <tessera/train/generate.hpp>
#include <tessera/train/layout_settings.hpp>
#include <tessera/train/loss_curve.hpp>
#include <tessera/train/machine.hpp>
#include <tessera/train/metrics.hpp>
#include <tessera/train/model_parts.hpp>
#include <tessera/train/model_settings.hpp>
#include <tessera/train/node_share.hpp>
#include <tessera/train/progress.hpp>
#include <tessera/train/report.hpp>
#include <tessera/train/run_state.hpp>
#include <tessera/train/sample.hpp>
#include <tessera/train/sample_rows.hpp>
#include <tessera/train/schedule_picture.hpp>
#include <tessera/train/settings.hpp>
#include <tessera/train/settings_json.hpp>
#include <tessera/train/summary.hpp>
#include <tessera/train/text_tokenizer.hpp>
#include <tessera/train/together.hpp>
#include <tessera/train/trainer.hpp>

#if defined(TESSERA_WITH_CUDA) && defined(__CUDACC__)
#include <tessera/cuda.cuh>
#endif

#endif
