// NCCL between threads of one process. A launch (one call, or a group) is one piece of work in a stream: once
// the stream has come to it, its buffers are the meeting's; when all ranks of a collective, or both sides of
// a message, have come, whoever looks next moves the data of all. Ranks that call different things, which
// the real one hangs or crashes on, get an error with a sentence. Nobody hears of a rank that aborts.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <nccl.h>

#include <cuda_emulation/library.hpp>
#include <cuda_emulation/nccl.hpp>

namespace {

using cuda_emulation::fault_kind;

enum class kind { reduce, broadcast, all_reduce, reduce_scatter, all_gather, send, receive };
char const* const kind_names[] = {"ncclReduce",    "ncclBroadcast", "ncclAllReduce", "ncclReduceScatter",
                                  "ncclAllGather", "ncclSend",      "ncclRecv"};

std::size_t bytes_of(ncclDataType_t type) {
  switch (type) {
  case ncclInt8:
  case ncclUint8:
    return 1;
  case ncclFloat16:
  case ncclBfloat16:
    return 2;
  case ncclInt32:
  case ncclUint32:
  case ncclFloat32:
    return 4;
  case ncclInt64:
  case ncclUint64:
  case ncclFloat64:
    return 8;
  default:
    return 0;
  }
}

struct launch;

struct operation {
  kind what{};
  void const* in = nullptr;
  void* out = nullptr;
  std::size_t count = 0;
  ncclDataType_t type{};
  ncclRedOp_t op = ncclSum;
  int root = -1; // or the peer
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;

  launch* owner = nullptr;
  bool done = false;

  bool message() const { return what == kind::send || what == kind::receive; }
  std::size_t bytes() const { return count * bytes_of(type); }
  std::string text() const {
    return std::string(kind_names[static_cast<int>(what)]) + " of " + std::to_string(count) +
           " elements of type " + std::to_string(type) +
           (root >= 0 ? " with rank " + std::to_string(root) : "") +
           (message() || what == kind::broadcast || what == kind::all_gather
                ? ""
                : " and operation " + std::to_string(op));
  }
};

struct launch {
  std::vector<operation> operations;
  bool numbered = false; // has its place among the launches of its communicator
  bool reached = false;  // its stream has come to it
  bool gone = false;     // with its communicator
  bool finished() const {
    if (gone) return true;
    for (auto const& each : operations)
      if (!each.done) return false;
    return true;
  }
};

/// The ranks of one communicator.
struct clique {
  explicit clique(int n) : members(static_cast<std::size_t>(n), nullptr) {}
  std::vector<ncclComm*> members; // null: not there yet, or gone
  int joined = 0;
  std::string failure; // of making it
};

struct split_call {
  int color = 0, key = 0;
  ncclComm_t* part = nullptr;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
};

} // namespace

struct ncclComm {
  std::shared_ptr<clique> all;
  int rank = 0, device = 0;
  bool blocking = true, ready = false;
  int hesitations = 0; // how often ncclCommGetAsyncError still says ncclInProgress
  ncclResult_t error = ncclSuccess;
  std::string last_error;
  std::deque<operation*> collectives;                    // in order, not done
  std::map<int, std::deque<operation*>> sends, receives; // by peer
  std::vector<std::shared_ptr<launch>> launches;         // in streams
  bool splitting = false;
  split_call split;
};

namespace {

std::mutex mutex;
std::condition_variable changed;
std::map<std::string, std::shared_ptr<clique>> forming; // by id
std::atomic<std::int64_t> ids{0}, communicators{0}, launches{0};
int failing_rank = -1;
ncclResult_t failing_with = ncclSuccess;

thread_local int group_depth = 0;
thread_local std::vector<operation> grouped;
thread_local std::string loose_error; // without a communicator

ncclResult_t failed(char const* call, ncclResult_t result, ncclComm_t comm, std::string text) {
  (comm != nullptr ? comm->last_error : loose_error) = std::move(text);
  cuda_emulation::returned_error(call, result);
  return result;
}
/// The result to return at once; success: go on.
ncclResult_t begin(char const* call, ncclComm_t comm) {
  return cuda_emulation::begin_call(call) == cudaSuccess
             ? ncclSuccess
             : failed(call, ncclUnhandledCudaError, comm, "a CUDA call failed");
}

// ---- data

float to_float(std::uint16_t bits, bool brain) {
  if (!brain) {
    _Float16 value;
    std::memcpy(&value, &bits, 2);
    return static_cast<float>(value);
  }
  std::uint32_t const word = static_cast<std::uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}
std::uint16_t from_float(float value, bool brain) {
  std::uint16_t bits;
  if (!brain) {
    auto const half = static_cast<_Float16>(value);
    std::memcpy(&bits, &half, 2);
    return bits;
  }
  std::uint32_t word;
  std::memcpy(&word, &value, 4);
  if (value != value) return static_cast<std::uint16_t>((word >> 16) | 0x40u);
  return static_cast<std::uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
}

template <class T>
T combined(T a, T b, ncclRedOp_t op) {
  if (op == ncclMax) return b > a ? b : a;
  if (op == ncclMin) return b < a ? b : a;
  if constexpr (std::is_floating_point_v<T>)
    return a + b;
  else
    return static_cast<T>(static_cast<std::make_unsigned_t<T>>(a) + static_cast<std::make_unsigned_t<T>>(b));
}
template <class T>
void combine(void* into, void const* from, std::size_t n, ncclRedOp_t op) {
  auto* a = static_cast<T*>(into);
  auto const* b = static_cast<T const*>(from);
  for (std::size_t i = 0; i < n; ++i) a[i] = combined(a[i], b[i], op);
}
/// As a ring does it: partial sums are stored.
void combine_into(void* into, void const* from, std::size_t n, ncclDataType_t type, ncclRedOp_t op) {
  switch (type) {
  case ncclInt8:
    return combine<std::int8_t>(into, from, n, op);
  case ncclUint8:
    return combine<std::uint8_t>(into, from, n, op);
  case ncclInt32:
    return combine<std::int32_t>(into, from, n, op);
  case ncclUint32:
    return combine<std::uint32_t>(into, from, n, op);
  case ncclInt64:
    return combine<std::int64_t>(into, from, n, op);
  case ncclUint64:
    return combine<std::uint64_t>(into, from, n, op);
  case ncclFloat32:
    return combine<float>(into, from, n, op);
  case ncclFloat64:
    return combine<double>(into, from, n, op);
  default: {
    bool const brain = type == ncclBfloat16;
    auto* a = static_cast<std::uint16_t*>(into);
    auto const* b = static_cast<std::uint16_t const*>(from);
    for (std::size_t i = 0; i < n; ++i)
      a[i] = from_float(combined(to_float(a[i], brain), to_float(b[i], brain), op), brain);
  }
  }
}

char const* at(void const* base, std::size_t offset) {
  return static_cast<char const*>(base) + offset;
}

/// All ranks' reduction of `n` elements from `begin` on, last rank first: not the order of anything else.
std::vector<char> reduction(std::vector<operation*> const& all, std::size_t begin, std::size_t n) {
  auto const item = bytes_of(all[0]->type);
  std::vector<char> sum(at(all.back()->in, begin * item), at(all.back()->in, (begin + n) * item));
  for (std::size_t r = all.size() - 1; r-- > 0;)
    combine_into(sum.data(), at(all[r]->in, begin * item), n, all[r]->type, all[r]->op);
  return sum;
}
void deliver(operation& to, void const* data, std::size_t bytes, std::size_t offset = 0) {
  auto* place = static_cast<char*>(to.out) + offset;
  if (bytes > 0 && cuda_emulation::write_memory(place, bytes, kind_names[static_cast<int>(to.what)]))
    std::memmove(place, data, bytes);
}
bool readable(operation const& from, std::size_t bytes) {
  return bytes == 0 || cuda_emulation::read_memory(from.in, bytes, kind_names[static_cast<int>(from.what)]);
}

void perform(std::vector<operation*> const& all) {
  auto const ranks = all.size();
  auto const& any = *all[0];
  auto const bytes = any.bytes();
  auto const root = static_cast<std::size_t>(any.root);
  switch (any.what) {
  case kind::broadcast: {
    if (!readable(*all[root], bytes)) return;
    std::vector<char> const data(at(all[root]->in, 0), at(all[root]->in, bytes));
    for (auto* each : all) deliver(*each, data.data(), bytes);
    return;
  }
  case kind::all_gather: {
    std::vector<std::vector<char>> parts;
    for (auto* each : all) {
      if (!readable(*each, bytes)) return;
      parts.emplace_back(at(each->in, 0), at(each->in, bytes));
    }
    for (auto* each : all)
      for (std::size_t r = 0; r < ranks; ++r) deliver(*each, parts[r].data(), bytes, r * bytes);
    return;
  }
  case kind::reduce:
  case kind::all_reduce: {
    for (auto* each : all)
      if (!readable(*each, bytes)) return;
    auto const sum = reduction(all, 0, any.count);
    for (std::size_t r = 0; r < ranks; ++r)
      if (any.what == kind::all_reduce || r == root) deliver(*all[r], sum.data(), bytes);
    return;
  }
  case kind::reduce_scatter: {
    for (auto* each : all)
      if (!readable(*each, bytes * ranks)) return;
    std::vector<std::vector<char>> sums;
    for (std::size_t r = 0; r < ranks; ++r) sums.push_back(reduction(all, r * any.count, any.count));
    for (std::size_t r = 0; r < ranks; ++r) deliver(*all[r], sums[r].data(), bytes);
    return;
  }
  default:
    return;
  }
}

// ---- meetings; all with the mutex held

void spoil(std::vector<operation*> const& all, std::string const& text) {
  for (auto* each : all) {
    each->comm->error = ncclInvalidUsage;
    each->comm->last_error = text;
  }
}

/// A collective whose ranks have all come: its data moves.
bool meet(ncclComm& comm) {
  auto& clique = *comm.all;
  std::vector<operation*> all;
  for (auto* member : clique.members) {
    if (member == nullptr || member->collectives.empty()) return false;
    auto* next = member->collectives.front();
    if (!next->owner->reached) return false;
    all.push_back(next);
  }
  auto const& first = *all[0];
  bool fits = true;
  for (std::size_t r = 1; r < all.size(); ++r) {
    auto const& other = *all[r];
    bool const adds = first.what != kind::broadcast && first.what != kind::all_gather;
    if (first.what != other.what || first.count != other.count || first.type != other.type ||
        first.root != other.root || (adds && first.op != other.op)) {
      spoil(all, "rank 0 calls " + first.text() + ", rank " + std::to_string(r) + " " + other.text());
      fits = false;
      break;
    }
  }
  if (fits) perform(all);
  for (auto* each : all) {
    each->done = true;
    each->comm->collectives.pop_front();
  }
  return true;
}

/// The next message from `from` to `to`, if both sides have come.
bool pass(ncclComm& from, ncclComm& to) {
  auto& sends = from.sends[to.rank];
  auto& receives = to.receives[from.rank];
  if (sends.empty() || receives.empty()) return false;
  auto &send = *sends.front(), &receive = *receives.front();
  if (!send.owner->reached || !receive.owner->reached) return false;
  if (send.count != receive.count || send.type != receive.type)
    spoil({&send, &receive}, "rank " + std::to_string(from.rank) + " calls " + send.text() + ", rank " +
                                 std::to_string(to.rank) + " " + receive.text());
  else if (readable(send, send.bytes()))
    deliver(receive, send.in, send.bytes());
  send.done = receive.done = true;
  sends.pop_front();
  receives.pop_front();
  return true;
}

void enter(launch& one) {
  if (one.numbered) return;
  one.numbered = true;
  for (auto& each : one.operations)
    (each.what == kind::send      ? each.comm->sends[each.root]
     : each.what == kind::receive ? each.comm->receives[each.root]
                                  : each.comm->collectives)
        .push_back(&each);
}

/// What a stream does at a launch: true when all of it is done.
bool advance(std::shared_ptr<launch> const& one, bool captured) {
  bool moved = false, finished = false;
  {
    std::lock_guard lock(mutex);
    if (one->gone) return true;
    enter(*one);
    one->reached = true; // and perhaps done already, by another rank
    for (bool again = true; again && !one->finished();) {
      again = false;
      for (auto& each : one->operations) {
        if (each.done) continue;
        auto& comm = *each.comm;
        if (!each.message()) {
          again |= meet(comm);
        } else if (auto* peer = comm.all->members[static_cast<std::size_t>(each.root)]; peer != nullptr) {
          again |= each.what == kind::send ? pass(comm, *peer) : pass(*peer, comm);
        }
      }
      moved |= again;
    }
    finished = one->finished();
    if (finished && captured) { // to be run again
      for (auto& each : one->operations) each.done = false;
      one->numbered = one->reached = false;
    }
  }
  if (moved) cuda_emulation::wake();
  return finished;
}

// ---- making, splitting

ncclComm* member_of(std::shared_ptr<clique> const& all, int rank, ncclConfig_t const& config) {
  auto* comm = new ncclComm();
  comm->all = all;
  comm->rank = rank;
  (void)cudaGetDevice(&comm->device);
  comm->blocking = config.blocking != 0;
  comm->hesitations = 3;
  all->members[static_cast<std::size_t>(rank)] = comm;
  ++communicators;
  return comm;
}
void look_for_twins(clique& all) {
  for (std::size_t a = 0; a < all.members.size(); ++a)
    for (std::size_t b = 0; b < a; ++b)
      if (all.members[a]->device == all.members[b]->device)
        all.failure = "Duplicate GPU detected: rank " + std::to_string(b) + " and rank " + std::to_string(a) +
                      " both on CUDA device " + std::to_string(all.members[a]->device);
}
/// Called when one more has come.
void complete_clique(clique& all) {
  if (++all.joined < static_cast<int>(all.members.size())) return;
  if (all.failure.empty()) look_for_twins(all);
  for (auto* member : all.members)
    if (member != nullptr) {
      member->ready = true;
      if (!all.failure.empty()) {
        member->error = ncclInvalidUsage;
        member->last_error = all.failure;
      }
    }
  changed.notify_all();
}

void split_if_all_here(clique& whole) {
  for (auto* member : whole.members)
    if (member == nullptr || !member->splitting) return;
  std::map<int, std::vector<ncclComm*>> colors;
  for (auto* member : whole.members)
    if (member->split.color >= 0) colors[member->split.color].push_back(member);
  for (auto& [color, members] : colors) {
    std::stable_sort(members.begin(), members.end(),
                     [](ncclComm* a, ncclComm* b) { return a->split.key < b->split.key; });
    auto part = std::make_shared<clique>(static_cast<int>(members.size()));
    part->joined = static_cast<int>(members.size());
    for (std::size_t r = 0; r < members.size(); ++r) {
      auto* child = member_of(part, static_cast<int>(r), members[r]->split.config);
      child->device = members[r]->device;
      child->ready = true;
      *members[r]->split.part = child;
    }
  }
  for (auto* member : whole.members) member->splitting = false;
  changed.notify_all();
}

// ---- calls

ncclResult_t usable(char const* call, ncclComm_t comm) {
  if (comm == nullptr) return failed(call, ncclInvalidArgument, nullptr, "the communicator is null");
  if (comm->error != ncclSuccess) return failed(call, comm->error, comm, comm->last_error);
  if (!comm->ready || comm->splitting || comm->hesitations > 0) {
    if (!comm->blocking)
      return failed(call, ncclInvalidArgument, comm,
                    "Attempt to use communicator before the previous operation returned ncclSuccess");
  }
  return ncclSuccess;
}

ncclResult_t put(std::vector<operation> operations, char const* call) {
  std::map<std::pair<ncclComm_t, cudaStream_t>, std::vector<operation>> by_stream;
  std::map<ncclComm_t, int> to_self;
  for (auto& each : operations) {
    if (each.message() && each.root == each.comm->rank)
      to_self[each.comm] += each.what == kind::send ? 1 : -1;
    by_stream[{each.comm, each.stream}].push_back(each);
  }
  for (auto const& [comm, difference] : to_self)
    if (difference != 0)
      return failed(call, ncclInvalidUsage, comm,
                    "a message to the rank itself without its other side in the same group");
  auto result = ncclSuccess;
  for (auto& [where, list] : by_stream) {
    auto one = std::make_shared<launch>();
    one->operations = std::move(list);
    for (auto& each : one->operations) each.owner = one.get();
    auto* comm = where.first;
    bool const captured = cuda_emulation::is_capturing(where.second);
    {
      std::lock_guard lock(mutex);
      if (!captured) enter(*one);
      std::erase_if(comm->launches, [](auto const& held) { return held->finished(); });
      comm->launches.push_back(one);
    }
    ++launches;
    if (cuda_emulation::enqueue(where.second, call, [one, captured] { return advance(one, captured); }) !=
        cudaSuccess)
      return failed(call, ncclUnhandledCudaError, comm, "the stream takes no work");
    if (!comm->blocking) {
      comm->hesitations = 3;
      result = ncclInProgress;
    }
  }
  return result;
}

ncclResult_t issue(operation const& one) {
  auto const* call = kind_names[static_cast<int>(one.what)];
  auto* comm = one.comm;
  if (auto const result = begin(call, comm); result != ncclSuccess) return result;
  {
    std::lock_guard lock(mutex);
    if (auto const result = usable(call, comm); result != ncclSuccess) return result;
  }
  auto const ranks = static_cast<int>(comm->all->members.size());
  auto const wrong = [&](char const* text) { return failed(call, ncclInvalidArgument, comm, text); };
  if (bytes_of(one.type) == 0) return wrong("there is no such type");
  if (one.op < 0 || one.op > ncclAvg) return wrong("there is no such operation");
  bool const rooted = one.message() || one.what == kind::reduce || one.what == kind::broadcast;
  if (rooted && (one.root < 0 || one.root >= ranks)) return wrong("the root or peer is no rank");
  if (cuda_emulation::device_of(one.stream) != comm->device)
    return wrong("the stream belongs to another device");
  bool const reads = one.what != kind::receive && (one.what != kind::broadcast || one.root == comm->rank);
  bool const writes = one.what != kind::send && (one.what != kind::reduce || one.root == comm->rank);
  for (auto const* memory :
       {reads ? one.in : nullptr, writes ? static_cast<void const*>(one.out) : nullptr}) {
    if (memory == nullptr) continue;
    if (one.count > 0 && cuda_emulation::device_of_memory(memory) != comm->device)
      return wrong("a buffer is not in the communicator's device memory");
  }
  if (one.count > 0 && ((reads && one.in == nullptr) || (writes && one.out == nullptr)))
    return wrong("a buffer is null");
  // In place means exactly this place.
  auto const overlaps = [&](std::size_t in_bytes, std::size_t out_bytes, std::size_t in_offset,
                            std::size_t out_offset) {
    auto const *a = static_cast<char const*>(one.in), *b = static_cast<char const*>(one.out);
    return reads && writes && a < b + out_bytes && b < a + in_bytes && a + in_offset != b + out_offset;
  };
  auto const bytes = one.bytes(), n = static_cast<std::size_t>(ranks),
             r = static_cast<std::size_t>(comm->rank);
  if (one.what == kind::all_gather       ? overlaps(bytes, n * bytes, 0, r * bytes)
      : one.what == kind::reduce_scatter ? overlaps(n * bytes, bytes, r * bytes, 0)
                                         : overlaps(bytes, bytes, 0, 0))
    return wrong("the buffers overlap");
  if (group_depth > 0) {
    grouped.push_back(one);
    return ncclSuccess;
  }
  return put({one}, call);
}

} // namespace

namespace cuda_emulation {

std::int64_t nccl_communicators() noexcept {
  return communicators;
}
std::int64_t nccl_launches() noexcept {
  return launches;
}
void set_nccl_async_error(int rank, ncclResult_t error) noexcept {
  std::lock_guard lock(mutex);
  failing_rank = error == ncclSuccess ? -1 : rank;
  failing_with = error;
}

} // namespace cuda_emulation

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  if (auto const result = begin("ncclGetUniqueId", nullptr); result != ncclSuccess) return result;
  std::memset(id, 0, sizeof *id);
  auto const number = ++ids;
  std::memcpy(id->internal, &number, sizeof number);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  auto const* call = "ncclCommInitRankConfig";
  *comm = nullptr;
  if (auto const result = begin(call, nullptr); result != ncclSuccess) return result;
  if (ranks < 1 || rank < 0 || rank >= ranks)
    return failed(call, ncclInvalidArgument, nullptr, "the rank is not one of the ranks");
  if (group_depth > 0) return failed(call, ncclInvalidUsage, nullptr, "not emulated in groups");
  std::unique_lock lock(mutex);
  auto& slot = forming[std::string(id.internal, sizeof id.internal)];
  if (!slot) slot = std::make_shared<clique>(ranks);
  auto all = slot;
  if (static_cast<int>(all->members.size()) != ranks ||
      all->members[static_cast<std::size_t>(rank)] != nullptr)
    return failed(call, ncclInvalidArgument, nullptr,
                  "ranks that share an id give different sizes, or the same rank twice");
  auto* mine = *comm = member_of(all, rank, *config);
  if (all->joined + 1 == ranks) forming.erase(std::string(id.internal, sizeof id.internal));
  complete_clique(*all);
  if (!mine->blocking) return ncclInProgress;
  changed.wait(lock, [&] { return mine->ready; });
  mine->hesitations = 0;
  return mine->error == ncclSuccess ? ncclSuccess : failed(call, mine->error, mine, mine->last_error);
}
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  return ncclCommInitRankConfig(comm, ranks, id, rank, &config);
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* part, ncclConfig_t* config) {
  auto const* call = "ncclCommSplit";
  *part = nullptr;
  if (auto const result = begin(call, comm); result != ncclSuccess) return result;
  std::unique_lock lock(mutex);
  if (auto const result = usable(call, comm); result != ncclSuccess) return result;
  comm->split = {color, key, part, {}};
  if (config != nullptr) {
    comm->split.config = *config;
  } else {
    comm->split.config = NCCL_CONFIG_INITIALIZER;
    comm->split.config.blocking = comm->blocking ? 1 : 0;
  }
  comm->splitting = true;
  split_if_all_here(*comm->all);
  if (!comm->blocking) {
    comm->hesitations = 3;
    return ncclInProgress;
  }
  changed.wait(lock, [&] { return !comm->splitting; });
  if (*part != nullptr) (*part)->hesitations = 0;
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  auto const* call = "ncclCommFinalize";
  if (auto const result = begin(call, comm); result != ncclSuccess) return result;
  std::lock_guard lock(mutex);
  if (auto const result = usable(call, comm); result != ncclSuccess) return result;
  for (auto const& each : comm->launches)
    if (each->numbered && !each->finished())
      return failed(call, ncclInvalidUsage, comm, "the emulation finalises only what is quiet");
  if (comm->blocking) return ncclSuccess;
  comm->hesitations = 3;
  return ncclInProgress;
}

static ncclResult_t leave(ncclComm_t comm) {
  {
    std::lock_guard lock(mutex);
    for (auto const& each : comm->launches) each->gone = true;
    comm->all->members[static_cast<std::size_t>(comm->rank)] = nullptr;
    comm->splitting = false;
    delete comm;
    --communicators;
  }
  cuda_emulation::wake();
  return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (auto const result = begin("ncclCommDestroy", comm); result != ncclSuccess) return result;
  if (comm == nullptr) return failed("ncclCommDestroy", ncclInvalidArgument, nullptr, "it is null");
  return leave(comm);
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (auto const result = begin("ncclCommAbort", comm); result != ncclSuccess) return result;
  if (comm == nullptr) return failed("ncclCommAbort", ncclInvalidArgument, nullptr, "it is null");
  return leave(comm);
}

char const* ncclGetErrorString(ncclResult_t result) {
  cuda_emulation::checked_error(result);
  constexpr char const* texts[] = {"no error",
                                   "unhandled cuda error",
                                   "unhandled system error",
                                   "internal error",
                                   "invalid argument",
                                   "invalid usage",
                                   "remote process exited or there was a network error",
                                   "NCCL operation in progress"};
  return result >= 0 && result < ncclNumResults ? texts[result] : "unknown result code";
}
char const* ncclGetLastError(ncclComm_t comm) {
  return (comm != nullptr ? comm->last_error : loose_error).c_str();
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  if (auto const result = begin("ncclCommGetAsyncError", comm); result != ncclSuccess) return result;
  if (comm == nullptr) return failed("ncclCommGetAsyncError", ncclInvalidArgument, nullptr, "it is null");
  std::lock_guard lock(mutex);
  *error = comm->error;
  if (comm->rank == failing_rank) {
    *error = failing_with;
    comm->last_error = "the test asked for it";
  }
  if (*error == ncclSuccess && !comm->blocking) {
    if (!comm->ready || comm->splitting)
      *error = ncclInProgress;
    else if (comm->hesitations > 0 && comm->hesitations-- > 1)
      *error = ncclInProgress;
  }
  return ncclSuccess;
}
ncclResult_t ncclCommCount(ncclComm_t comm, int* count) {
  *count = static_cast<int>(comm->all->members.size());
  return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(ncclComm_t comm, int* device) {
  *device = comm->device;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank) {
  *rank = comm->rank;
  return ncclSuccess;
}

ncclResult_t ncclReduce(void const* in, void* out, std::size_t count, ncclDataType_t type, ncclRedOp_t op,
                        int root, ncclComm_t comm, cudaStream_t stream) {
  return issue({kind::reduce, in, out, count, type, op, root, comm, stream});
}
ncclResult_t ncclBroadcast(void const* in, void* out, std::size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return issue({kind::broadcast, in, out, count, type, ncclSum, root, comm, stream});
}
ncclResult_t ncclAllReduce(void const* in, void* out, std::size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return issue({kind::all_reduce, in, out, count, type, op, -1, comm, stream});
}
ncclResult_t ncclReduceScatter(void const* in, void* out, std::size_t out_count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return issue({kind::reduce_scatter, in, out, out_count, type, op, -1, comm, stream});
}
ncclResult_t ncclAllGather(void const* in, void* out, std::size_t in_count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return issue({kind::all_gather, in, out, in_count, type, ncclSum, -1, comm, stream});
}
ncclResult_t ncclSend(void const* in, std::size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return issue({kind::send, in, nullptr, count, type, ncclSum, peer, comm, stream});
}
ncclResult_t ncclRecv(void* out, std::size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return issue({kind::receive, nullptr, out, count, type, ncclSum, peer, comm, stream});
}

ncclResult_t ncclGroupStart() {
  if (auto const result = begin("ncclGroupStart", nullptr); result != ncclSuccess) return result;
  ++group_depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (auto const result = begin("ncclGroupEnd", nullptr); result != ncclSuccess) {
    group_depth = 0;
    grouped.clear();
    return result;
  }
  if (group_depth == 0) return failed("ncclGroupEnd", ncclInvalidUsage, nullptr, "without ncclGroupStart");
  if (--group_depth > 0) return ncclSuccess;
  auto operations = std::move(grouped);
  grouped.clear();
  return operations.empty() ? ncclSuccess : put(std::move(operations), "ncclGroupEnd");
}
}
