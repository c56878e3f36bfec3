// The sums of comm::nccl in rank order.
#include <tessera/comm/cuda/nccl.cuh>

using namespace tessera;

template bool comm::detail::combine_on_device<float>(void*, comm::detail::combine_step const&);
template bool comm::detail::combine_on_device<bf16>(void*, comm::detail::combine_step const&);
template bool comm::detail::combine_on_device<fp16>(void*, comm::detail::combine_step const&);
template bool comm::detail::combine_on_device<double>(void*, comm::detail::combine_step const&);
template bool comm::detail::combine_on_device<std::int32_t>(void*, comm::detail::combine_step const&);
template bool comm::detail::combine_on_device<std::int64_t>(void*, comm::detail::combine_step const&);
